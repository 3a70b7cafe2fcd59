# To train with, on NVIDIA's PyTorch: its torch is used and never replaced, what is missing is installed with checksums, and the
# kernels are compiled for GPUs. Nothing runs as root. From the checkout:
#   docker build --tag megatron .
#   docker run --gpus all --ipc host --ulimit memlock=-1 --volume /data:/data megatron bash examples/qwen3_0.6b.sh --dry-run
# The project's tests read this file and try what it copies; they cannot build it (docs/launchers.md).
FROM nvcr.io/nvidia/pytorch:25.11-py3

RUN useradd --create-home --uid 10001 trainer && mkdir /opt/megatron && chown trainer:trainer /opt/megatron
USER trainer
WORKDIR /opt/megatron

COPY --chown=trainer:trainer constraints.lock requirements.txt pyproject.toml setup.py README.md LICENSE ./
COPY --chown=trainer:trainer configs/ configs/
COPY --chown=trainer:trainer csrc/ csrc/
COPY --chown=trainer:trainer examples/ examples/
COPY --chown=trainer:trainer megatron/ megatron/
COPY --chown=trainer:trainer tasks/ tasks/
COPY --chown=trainer:trainer tools/ tools/
COPY --chown=trainer:trainer megatron_anywhere.py pretrain_gpt.py ./
RUN bash -euo pipefail -c '. examples/setup.sh && setup_environment'

ENV PATH=/opt/megatron/.venv/bin:$PATH
CMD ["bash"]
