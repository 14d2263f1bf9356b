#!/bin/sh
# Checks that `make setup-gpu` can work on this machine; if not, prints the reason in one line and exits with code 1.
# If TORCH_CUDA_ARCH_LIST names the GPUs to build for, this machine needs no GPU.
needs() {
  echo "make setup-gpu needs $1" >&2
  exit 1
}

machine=$(uname -s -m)
[ "$machine" = "Linux x86_64" ] || needs "Linux x86_64, got $machine"

glibc=$(getconf GNU_LIBC_VERSION | cut -d' ' -f2)
[ "$(printf '2.34\n%s\n' "$glibc" | sort -V | head -n1)" = 2.34 ] ||
  needs "glibc 2.34 or later for SGLang's wheel (Ubuntu 22.04, RHEL 9), got $glibc"

for tool in c++ git; do
  command -v $tool >/dev/null || needs "$tool to build Transformer Engine and apex, found none"
done

[ -z "$TORCH_CUDA_ARCH_LIST" ] || exit 0
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n1)
[ -n "$driver" ] || needs "a GPU, but nvidia-smi shows none; \
on a machine without GPU, such as a login node, name the GPUs to build for: make setup-gpu TORCH_CUDA_ARCH_LIST=9.0"
[ "${driver%%.*}" -ge 580 ] || needs "NVIDIA's driver 580 or later for CUDA 13, got $driver"
