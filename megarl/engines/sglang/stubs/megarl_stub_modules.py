"""Stub modules that have names but no behavior.

SGLang imports GPU-only wheels at module level even where it never calls them. Each folder next to this file replaces
one of them, only in engine processes on nodes without CUDA:

    triton       kernels are decorated at import; the CPU engine runs none of them
    torchvision  image processors are imported by the model registry
    sgl_kernel   CUDA kernels, no CPU wheel on PyPI
    IPython      imported for a notebook helper

A stub has every attribute: a class for a capitalized name, a submodule otherwise.
"""

import importlib.machinery
import sys
import types


class _NameOnly(type):
    """Metaclass of stub classes: any attribute is its own name as a string, because SGLang reads enums at import."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Anything(metaclass=_NameOnly):
    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__()


class StubModule(types.ModuleType):
    """A package that creates any missing attribute; calling it acts as a decorator that changes nothing."""

    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []
        self.__package__ = name
        self.__file__ = __file__
        self.__spec__ = importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)

    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        qualified = f"{self.__name__}.{name}"
        if name[:1].isupper():
            value = _NameOnly(name, (_Anything,), {"__module__": self.__name__})
        else:
            value = sys.modules.get(qualified) or StubModule(qualified)
        setattr(self, name, value)
        return value

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function

    def __bool__(self):
        return False

    def __iter__(self):
        return iter(())

    def __mro_entries__(self, bases):
        return (_Anything,)


class _Loader:
    def create_module(self, spec):
        module = StubModule(spec.name)
        parent, _, child = spec.name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], child, module)
        return module

    def exec_module(self, module):
        pass


class _Finder:
    """Import finder that provides every submodule of one stub."""

    def __init__(self, root):
        self.prefix = root + "."

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith(self.prefix):
            return importlib.machinery.ModuleSpec(fullname, _Loader(), is_package=True)
        return None


def install(root, version, **attributes):
    """Replace the importing package `root` by a stub with the given version (SGLang compares versions at import)."""
    module = StubModule(root)
    module.__version__ = version
    for name, value in attributes.items():
        setattr(module, name, value)
    sys.meta_path.insert(0, _Finder(root))
    sys.modules[root] = module
    return module
