# The program for CPUs, with ffmpeg for videos. `tools/packaging/check_dockerfile.py` checks what can be checked without
# an engine.
#
#     docker build --build-arg OMNIGRPO_COMMIT="$(git rev-parse --short=12 HEAD)" -t omnigrpo .
#     docker run --rm -v "$PWD:/data" omnigrpo doctor
#
# The stage `cluster` adds CUDA's libraries, MPI and Python, about 1.5 GB more. The driver comes from the machine.
#
#     docker build --target cluster -t omnigrpo:cluster .
#     docker run --rm --gpus all -v "$PWD:/data" omnigrpo:cluster doctor --gpu

FROM rust:1.95.0-slim-bookworm AS build
WORKDIR /src
COPY Cargo.toml Cargo.lock rust-toolchain.toml ./
COPY crates crates
COPY examples examples
# Commit that `omnigrpo --version` names.
ARG OMNIGRPO_COMMIT=
RUN cargo build --locked --profile dist --package omnigrpo

FROM debian:bookworm-slim AS small
RUN apt-get update \
    && apt-get install -y --no-install-recommends ffmpeg \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 omnigrpo
COPY --from=build /src/target/dist/omnigrpo /usr/local/bin/omnigrpo
COPY LICENSE /usr/share/doc/omnigrpo/LICENSE
USER omnigrpo
WORKDIR /data
ENTRYPOINT ["omnigrpo"]
CMD ["--help"]

FROM small AS cluster
USER root
RUN apt-get update \
    && apt-get install -y --no-install-recommends openmpi-bin openssh-client python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/cuda \
    && /opt/cuda/bin/pip install --no-cache-dir 'nvidia-cuda-nvrtc>=13,<14' 'nvidia-cublas>=13,<14' 'nvidia-nccl-cu13>=2.27,<3'
ENV VIRTUAL_ENV=/opt/cuda NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER omnigrpo

# The last stage is the one that `docker build` makes.
FROM small
