"""The one import: `import mindspeed.megatron_adaptor` under `import torch`.

Megatron then runs on the device at hand, with the default options. Flags of a Megatron-LM script,
or `mindspeed.enable(...)`, put others in force.
"""

from mindspeed.compat import megatron
from mindspeed.debug import attach_if_asked
from mindspeed.features import activation

megatron.require()
activation.current().activate(activation.current().registry.options_class())
attach_if_asked()
