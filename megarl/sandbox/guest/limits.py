"""Limits of a sandbox."""

from __future__ import annotations

MIB = 2**20


class Limits:
    """What programs in a sandbox may use at most. No dataclass: importing those takes a third of a runner's start."""

    __slots__ = ("cpu_seconds", "disk_bytes", "max_processes", "memory_bytes", "output_bytes", "wall_seconds")

    def __init__(
        self,
        *,
        wall_seconds: float = 10.0,
        cpu_seconds: int = 5,
        memory_bytes: int = 512 * MIB,
        disk_bytes: int = 64 * MIB,
        max_processes: int = 16,
        output_bytes: int = 64 * 1024,
    ) -> None:
        """Create limits.

        Args:
            wall_seconds: time of one program, or of one cell of an interpreter.
            cpu_seconds: CPU time of one process of a program; of an interpreter only `wall_seconds` counts.
            memory_bytes: address space of each process, and resident memory of all of them together.
            disk_bytes: size of the folder /tmp, which is in memory.
            max_processes: processes and threads at once, including the one that runs the programs.
            output_bytes: bytes of stdout, of stderr and of a returned value.
        """
        self.wall_seconds, self.cpu_seconds = wall_seconds, cpu_seconds
        self.memory_bytes, self.disk_bytes = memory_bytes, disk_bytes
        self.max_processes, self.output_bytes = max_processes, output_bytes

    def enlarged(self, *, output_bytes: int, input_bytes: int) -> Limits:
        """Return the limits with room for an output of this size, and for an input beside the files of the program."""
        changed = {
            "output_bytes": max(self.output_bytes, output_bytes),
            "disk_bytes": self.disk_bytes + input_bytes,
        }
        return Limits(**self.as_dict() | changed)  # type: ignore[arg-type]

    def as_dict(self) -> dict[str, float]:
        """Return the arguments that make these limits."""
        return {name: getattr(self, name) for name in self.__slots__}
