# docker build --tag pdsl .                          all commands
# docker run --rm --user "$(id -u)" --volume "$PWD:/data" --workdir /data pdsl run
# docker build --target peer --tag pdsl-peer .       the peer of an organisation, see deploy/compose.yaml
# docker run --user "$(id -u)" --volume "$PWD/aachen:/peer" --publish 7443:7443 pdsl-peer run /peer --listen 0.0.0.0:7443 --log-json
#
# On Linux pip installs PyTorch with CUDA unless an index with CPU builds is given:
#   docker build --build-arg PIP_EXTRA_INDEX_URL=<PyTorch's index of CPU builds> --tag pdsl .
FROM python:3.11-slim AS installed

ARG PIP_EXTRA_INDEX_URL
WORKDIR /build
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --disable-pip-version-check --constraint constraints.txt ".[peer]" \
 && useradd --create-home pdsl
USER pdsl
WORKDIR /home/pdsl

# The peer is process 1. On SIGTERM it says goodbye to its neighbours and ends within 4 seconds.
FROM installed AS peer
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=10s --start-period=180s --retries=3 CMD ["pdsl", "peer", "health", "/peer"]
ENTRYPOINT ["pdsl", "peer"]
CMD ["run", "/peer", "--log-json"]

FROM installed AS pdsl
ENTRYPOINT ["pdsl"]
CMD ["--help"]
