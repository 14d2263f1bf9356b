"""What starts sandboxes outside of them; imports nothing but the standard library and `megarl.sandbox.guest`."""
