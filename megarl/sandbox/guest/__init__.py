"""What runs inside a sandbox, beside untrusted programs; imports nothing but the standard library and itself."""
