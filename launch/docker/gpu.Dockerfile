# Image for GPUs, based on NVIDIA's image with PyTorch, Transformer Engine and NCCL:
#   docker build --file launch/docker/gpu.Dockerfile --tag diffmegatron .
#   docker run --gpus all --ipc host --ulimit memlock=-1 --volume "$PWD":/workspace diffmegatron quickstart
FROM nvcr.io/nvidia/pytorch:25.09-py3

WORKDIR /opt/diffmegatron
COPY pyproject.toml README.md LICENSE ./
COPY diffmegatron diffmegatron
COPY configs configs
COPY launch launch
# Keep the torch of the image, because its Transformer Engine and NCCL are built for this torch. Unset
# PIP_CONSTRAINT, because the image's own constraints exclude newer libraries that are needed here.
RUN python -c 'import torch; print(f"torch=={torch.__version__}")' > constraints.txt \
 && PIP_CONSTRAINT= pip install --no-cache-dir --constraint constraints.txt .

WORKDIR /workspace
ENTRYPOINT ["diffmegatron"]
CMD ["doctor"]
