import json
import os

import numpy as np
from safetensors.numpy import save_file

N, T, radii, clip, rate, tau, tensors = 50, 20, [0, 1, 2, 3], 1.0, 0.1, 1e-12, {}
x, y = np.random.default_rng(0).multivariate_normal([0, 0], [[1, 0.7], [0.7, 1]], N).T
for k in radii:
    low = high = np.zeros(1)
    for _ in range(T):  # gradients grow with w; k of them become +clip or -clip, wherever that moves w most
        g, h = (np.sort(np.clip(x * (x * w - y), -clip, clip)) for w in (low, high))
        low = low - rate / N * (h[k:].sum() + k * clip) - k * tau
        high = high - rate / N * (g[: N - k].sum() - k * clip) + k * tau
    tensors |= {f"lower/{k}/w": low, f"upper/{k}/w": high} | ({} if k else {"nominal/w": low})
metadata = {"format_version": 1, "adjacency": "replace-one", "slots": N, "steps": T, "concretisation": 1}
metadata |= {"radii": radii, "parameters": [{"name": "w", "shape": [1]}], "backend": "interval example"}
metadata |= {"capabilities": {"sound": True, "monotone": True, "rigour": "tolerance", "tau": tau}}
os.umask(0o077)  # an envelope is private data
save_file(tensors, "linear.envelope.safetensors", {"certdp": json.dumps(metadata)})
