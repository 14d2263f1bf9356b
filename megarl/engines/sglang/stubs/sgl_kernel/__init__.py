import megarl_stub_modules

megarl_stub_modules.install(__name__, "0.4.10")
