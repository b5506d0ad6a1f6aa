# SGLang's own image with this package beside it: nothing of SGLang, torch or Triton is installed anew.
#
#   docker build -t sglang-mla-ext .
#
# CI has no Docker and does not build it. What it relies on CI does check: that the wheel installs by --no-deps beside
# SGLang 0.5.23, is found by it as a plug-in, and can run there (tests/unit/test_package.py). Another release of SGLang's:
# --build-arg SGLANG_IMAGE=lmsysorg/sglang:TAG. How to add the wheel to an image that is there: docs/operating.md.
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.23
FROM ${SGLANG_IMAGE}
COPY . /tmp/sglang-mla-ext
RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir --no-deps /tmp/sglang-mla-ext
