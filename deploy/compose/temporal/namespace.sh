#!/bin/sh
# The namespace with the retention that operators need, and the search attributes that Everstep
# sets. Harmless when it is run again. TEMPORAL_ADDRESS and TEMPORAL_NAMESPACE say where.
set -eu

temporal operator namespace describe --namespace "$TEMPORAL_NAMESPACE" >/dev/null 2>&1 ||
    temporal operator namespace create --namespace "$TEMPORAL_NAMESPACE" --retention 720h
temporal operator namespace update --namespace "$TEMPORAL_NAMESPACE" --retention 720h

# A new namespace takes some seconds to be known everywhere.
tries=0
until known=$(temporal operator search-attribute list --output json); do
    tries=$((tries + 1))
    [ "$tries" -lt 60 ] || exit 1
    sleep 1
done
for name in EverstepState EverstepSymptom EverstepCodeVersion; do
    case $known in
    *"\"$name\""*) ;;
    *) temporal operator search-attribute create --name "$name" --type Keyword ;;
    esac
done
