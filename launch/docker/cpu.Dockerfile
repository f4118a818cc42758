# Image for machines without GPUs: prepare data, plan, rehearse, export, and run the quickstart.
#   docker build --file launch/docker/cpu.Dockerfile --tag diffmegatron-cpu .
#   docker run --volume "$PWD":/workspace diffmegatron-cpu quickstart
FROM python:3.12-slim

# DeepSpeed and Triton compile small extensions when they are imported.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc g++ \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/diffmegatron
COPY pyproject.toml constraints.txt README.md LICENSE ./
# Install torch first. TORCH_INDEX may name an index that has builds of torch without CUDA. Such an
# index lacks the pinned versions of torch's dependencies, which the last step installs.
ARG TORCH_INDEX=""
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} \
    --no-deps --constraint constraints.txt torch
COPY diffmegatron diffmegatron
COPY configs configs
COPY launch launch
RUN pip install --no-cache-dir --constraint constraints.txt .

WORKDIR /workspace
ENTRYPOINT ["diffmegatron"]
CMD ["doctor"]
