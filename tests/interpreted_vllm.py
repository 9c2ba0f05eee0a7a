"""vLLM's command line with its second model runner on the CPU: Triton's interpreter runs the kernels, slowly. For tests only.

Sampling masks and routed experts exist in that runner alone, which a CPU build refuses for want of Triton. Needs the package triton (3.7).
Worker processes import this file anew, so that what it changes holds in them too.
"""

from __future__ import annotations

import os
import sys

from triton import backends

from molt_hpc.rollout.vllm_launch import answer_for_cpu_build

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}


class Interpreter:
    """A backend that is there: nothing is compiled for it."""

    driver, compiler = type("Driver", (), {"is_active": staticmethod(lambda: True)}), None


backends.backends["cpu"] = Interpreter
answer_for_cpu_build()

from vllm.v1.sample.ops import topk_topp_sampler

topk_topp_sampler.HAS_TRITON = False  # the interpreter cannot run this one kernel; vLLM has the same in PyTorch

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
