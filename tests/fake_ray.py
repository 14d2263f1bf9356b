"""A fake Ray with a clock: tests end its references, and waiting for them advances the clock."""

from ray.exceptions import RayError


class Ref:
    """A reference that has a value or an error once it is done."""

    was_cancelled = was_returned = False

    def __init__(self, *, is_done=False):
        self.value, self.is_done = None, is_done

    def end(self, value=None):
        self.value, self.is_done = value, True


class FakeRay:
    """Fake Ray and clock: waiting advances the time; `before_waiting` is called before each wait."""

    def __init__(self):
        self.now, self.killed, self.before_waiting = 100.0, [], lambda: None

    def wait(self, refs, *, num_returns=1, timeout=None):
        if timeout:
            self.before_waiting()
        done = [ref for ref in refs if ref.is_done][:num_returns]
        if len(done) < num_returns:
            assert timeout is not None
            self.now += timeout
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref):
        if isinstance(ref, list):
            return [self.get(each) for each in ref]
        assert ref.is_done
        if isinstance(ref.value, RayError):
            raise ref.value
        return ref.value

    def kill(self, actor):
        self.killed.append(actor)
        actor.die()

    def time(self):
        return self.now

    monotonic = time

    def sleep(self, seconds):
        self.now += seconds
