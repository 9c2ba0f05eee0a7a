"""Reinforcement-learning post-training of LLM agents on Slurm clusters, without Ray.

The data path goes one way::

    1 prompt      data/prompts.py      rows with ordinals, in an order fixed by the seed
    2 broker      broker/ledger.py     admits groups, leases their rollouts to workers that ask
    3 rollout     rollout/worker.py    runs the agent against a stock vLLM server, token in, token out
    4 trajectory  records.py, wire.py  token ids, log-probs, weight-version spans, reward
    5 broker      broker/server.py     completes groups, ships one batch a step
    6 trainer     train/loop.py        advantages, packed forward, loss, one optimizer step
    7 weights     broker/updates.py    pause -> transfer -> finish -> verify -> resume
    8 rollout                          the next prompt is sampled from the new version

Three small messages run backwards: `trained` (6 -> 5), `version` (7 -> 3) and `stop`.
`rollout/` and `train/` never import each other; `slurm/` starts processes and is the only
package that knows by which launcher; `observe/` turns what the others report into files.
"""

__version__ = "0.1.0"
