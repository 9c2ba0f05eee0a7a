"""Train a run's saved batches again and compare loss and gradient norm with what the run recorded.

    python tools/replay.py step RUN --step 12

Starts as many training ranks on this machine as the run had, from the nearest checkpoint before the
step (or the initial model), and prints for every step on the way whether the numbers are equal.
"""

import sys

from molt_hpc.train.replay import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
