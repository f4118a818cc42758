# For GPUs, on NVIDIA's image with PyTorch, Transformer Engine and NCCL:
#   docker build --file launch/docker/gpu.Dockerfile --tag diffmegatron .
#   docker run --gpus all --ipc host --ulimit memlock=-1 --volume "$PWD":/workspace diffmegatron quickstart
FROM nvcr.io/nvidia/pytorch:25.09-py3

WORKDIR /opt/diffmegatron
COPY pyproject.toml README.md LICENSE ./
COPY diffmegatron diffmegatron
COPY configs configs
COPY launch launch
# The image's torch stays: its Transformer Engine and NCCL are built for it. Its own constraints
# would hold back libraries that are needed newer.
RUN python -c 'import torch; print(f"torch=={torch.__version__}")' > constraints.txt \
 && PIP_CONSTRAINT= pip install --no-cache-dir --constraint constraints.txt .

WORKDIR /workspace
ENTRYPOINT ["diffmegatron"]
CMD ["doctor"]
