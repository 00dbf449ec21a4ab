# Every target makes .venv by itself when it is missing or stale (scripts/bootstrap).
#
#   make demo     a real training job, broken again and again, that ends as if nothing had happened
#   make test     all tests            (make test ARGS="-k ladder"; scripts/test lists the tiers)
#   make check    format, lint, types, architecture, docs
#   make bench    benchmarks; results in benchmarks/results/
#   make sweep    a crash at every point of a recovery; takes hours (make sweep ARGS="--shard 1/8")
#   make clean    removes .venv and everything that was made here
#
# PYTHON=python3.12 picks the interpreter (3.11 or newer).

PYTHON ?= python3
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help venv demo test check bench sweep clean

help:
	@sed -n 's/^#   //p' Makefile

venv:
	@scripts/bootstrap

demo:
	@scripts/demo $(ARGS)

test:
	@scripts/test all $(ARGS)

check:
	@scripts/check

bench:
	@scripts/bench $(ARGS)

sweep:
	@scripts/sweep $(ARGS)

clean:
	@scripts/clean
