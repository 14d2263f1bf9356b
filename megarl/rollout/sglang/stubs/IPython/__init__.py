import megarl_stub_modules

megarl_stub_modules.install(__name__, "9.0.0")
