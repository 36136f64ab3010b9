# The program for CPUs, with ffmpeg for videos. `tools/packaging/check_dockerfile.py` checks what can be checked without
# an engine.
#
#     docker build -t omnigrpo .
#     docker run --rm -v "$PWD:/data" omnigrpo doctor

FROM rust:1.95.0-slim-bookworm AS build
WORKDIR /src
COPY Cargo.toml Cargo.lock rust-toolchain.toml ./
COPY crates crates
COPY examples examples
RUN cargo build --locked --profile dist --package omnigrpo

FROM debian:bookworm-slim
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
