# syntax=docker/dockerfile:1
# docker build -t csa-lightning .
# docker build --build-arg EXTRAS=wandb,tensorboard,flashmla,cudnn --build-arg TORCH_VERSION=2.11.0 ...   FlashMLA's forward and cuDNN's backward
# docker build --build-arg EXTRAS=wandb,tensorboard,te ...                                                Transformer Engine, for FP8 projections
# docker run --rm --gpus all -v "$PWD/runs:/home/csa/work/runs" csa-lightning trainer=gpu backend=triton
# docker run --rm --gpus all -v "$PWD/runs:/home/csa/work/runs" csa-lightning trainer=gpu backend=flashmla model=small_flash
# docker run --rm --gpus all --entrypoint python csa-lightning -m kernels.doctor

ARG CUDA_VERSION=13.0.2
ARG UBUNTU=24.04

FROM nvidia/cuda:${CUDA_VERSION}-devel-ubuntu${UBUNTU} AS build
ARG EXTRAS=wandb,tensorboard
ARG TORCH_VERSION=2.13.0
ARG PIP_ARGS=""
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes python3-dev python3-venv build-essential \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:${PATH}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /opt/csa
# torch, Lightning, Hydra, wandb and Triton come at the versions of constraints.txt; the extras are resolved against them
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY kernels kernels
COPY csa_model csa_model
COPY eval eval
# Another torch brings its own Triton. No build isolation: Transformer Engine compiles its torch part against the torch installed here,
# with the headers of the CUDA packages that torch brought.
# hadolint ignore=SC2086
RUN sed -i "s/^torch==.*/torch==${TORCH_VERSION}/" constraints.txt \
    && if [ "${TORCH_VERSION}" != 2.13.0 ]; then sed -i "/^triton==/d" constraints.txt; fi \
    && pip install ${PIP_ARGS} --constraint constraints.txt torch "setuptools>=77" wheel ninja pybind11 \
    && site="$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')" \
    && export CUDNN_PATH="${site}/nvidia/cudnn" \
    && CPATH="$(find "${site}/nvidia" -maxdepth 2 -name include -printf '%p:')" \
    && export CPATH \
    && pip install ${PIP_ARGS} --no-build-isolation --constraint constraints.txt ".[${EXTRAS}]" \
    && pip uninstall --yes csa-lightning

FROM nvidia/cuda:${CUDA_VERSION}-base-ubuntu${UBUNTU} AS run
# gcc: Triton compiles its launchers at run time
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes python3 python3-dev gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1001 csa
COPY --from=build /opt/venv /opt/venv
COPY --chown=csa:csa train.py pyproject.toml LICENSE NOTICE /opt/csa/
COPY --chown=csa:csa configs /opt/csa/configs
COPY --chown=csa:csa kernels /opt/csa/kernels
COPY --chown=csa:csa csa_model /opt/csa/csa_model
COPY --chown=csa:csa eval /opt/csa/eval
ENV PATH=/opt/venv/bin:${PATH} \
    PYTHONPATH=/opt/csa \
    PYTHONUNBUFFERED=1
USER 1001
RUN mkdir -p /home/csa/work/runs /home/csa/work/data_cache
WORKDIR /home/csa/work
ENTRYPOINT ["python", "/opt/csa/train.py"]
