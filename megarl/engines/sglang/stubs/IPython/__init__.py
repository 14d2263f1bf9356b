import sys

import megarl_stub_modules

megarl_stub_modules.install(__name__, "9.0.0")
sys.modules[__name__].get_ipython = lambda: None  # outside a notebook, which Ray asks for when it is imported
