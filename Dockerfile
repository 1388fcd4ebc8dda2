# docker build --tag pdsl .
# docker run --rm --user "$(id -u)" --volume "$PWD:/data" --workdir /data pdsl run
#
# On Linux pip installs PyTorch with CUDA unless an index with CPU builds is given:
#   docker build --build-arg PIP_EXTRA_INDEX_URL=<PyTorch's index of CPU builds> --tag pdsl .
FROM python:3.11-slim

ARG PIP_EXTRA_INDEX_URL
WORKDIR /build
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --disable-pip-version-check --constraint constraints.txt ".[peer]" \
 && useradd --create-home pdsl

USER pdsl
WORKDIR /home/pdsl
ENTRYPOINT ["pdsl"]
CMD ["--help"]
