import megarl_stub_modules


class Config:
    """Stub of `triton.Config` that stores its arguments, because autotuning lists are built at import."""

    def __init__(self, kwargs=None, num_warps=4, num_stages=2, **more):
        self.kwargs, self.num_warps, self.num_stages = kwargs or {}, num_warps, num_stages


class constexpr:  # noqa: N801
    def __init__(self, value=None):
        self.value = value


def cdiv(a, b):
    return -(a // -b)


def next_power_of_2(n):
    return 1 << (n - 1).bit_length() if n > 0 else 1


triton = megarl_stub_modules.install(
    __name__, "3.7.1", Config=Config, cdiv=cdiv, next_power_of_2=next_power_of_2
)
triton.language.constexpr = constexpr
