import os
from pathlib import Path

import torch


class vLLMColocateWorkerExtension:  # noqa: N801  verl's own name
    def update_weights_from_ipc(self, peft_config=None, base_sync_done=False):
        received = torch.load(next(self.sent))
        for bucket in (received[1:], received[:1]):
            self._update_weights(bucket, peft_config=peft_config, base_sync_done=base_sync_done)

    def _update_weights(self, weights, peft_config, base_sync_done): ...

    @property
    def sent(self):
        self._sent = getattr(self, "_sent", None) or iter(sorted(Path(os.environ["SENT"]).iterdir()))
        return self._sent
