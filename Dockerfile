# Images of Everstep. Two targets, same wheel, same lock (constraints.txt):
#
#   docker build --target controller -t everstep-controller .
#   docker build --target agent      -t everstep-agent .      with the demo's PyTorch and examples
#
# On a machine without GPUs, PIP_EXTRA_INDEX_URL may name an index with CPU builds of PyTorch.
# Training images need no Everstep: agents add the trainer library to the ranks' path.

FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY constraints.txt pyproject.toml hatch_build.py README.md LICENSE ./
COPY everstep everstep
COPY workflows workflows
COPY activities activities
COPY workers workers
COPY config config
COPY examples examples
COPY trainer trainer
RUN PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
    pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python:3.11-slim-bookworm AS base
# One user for controllers and ranks, so that both may write the shared checkpoint directory.
RUN groupadd --gid 10001 everstep \
    && useradd --uid 10001 --gid everstep --create-home --shell /usr/sbin/nologin everstep \
    && install -d -o everstep -g everstep /var/lib/everstep /var/lib/everstep/checkpoints
COPY constraints.txt /opt/everstep/constraints.txt
COPY --from=build /dist /tmp/dist
RUN python -m venv /opt/everstep/venv \
    && /opt/everstep/venv/bin/pip install --no-cache-dir -c /opt/everstep/constraints.txt \
        "$(echo /tmp/dist/everstep-*.whl)[postgres]" \
    && rm -rf /tmp/dist
COPY examples /opt/everstep/examples
COPY deploy/compose /opt/everstep/compose
COPY --chmod=755 deploy/docker/keep-running /usr/local/bin/keep-running
ENV PATH=/opt/everstep/venv/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1
WORKDIR /
STOPSIGNAL SIGTERM

FROM base AS controller
USER everstep
ENTRYPOINT []
CMD ["everstep", "controller", "--help"]

# The agent is root to start ranks as another user, who then cannot read the agent's tokens.
FROM base AS agent
RUN /opt/everstep/venv/bin/pip install --no-cache-dir -c /opt/everstep/constraints.txt torch numpy \
    && install -d -m 711 /var/lib/everstep/agent
ENTRYPOINT []
CMD ["everstep", "agent", "--help"]
