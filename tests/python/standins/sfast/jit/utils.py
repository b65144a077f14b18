"""What is attached to a traced module: an object of Python's, which an archive cannot have."""

import torch


class ScriptModuleClearHook:
    def __init__(self, module):
        self.kind = str(module)


def attach_script_module_clear_hook(module, name="_module_registration_clear_hook"):
    module._register_attribute(name, torch._C.PyObjectType.get(), ScriptModuleClearHook(module))


def better_trace(function, *arguments, **options):
    module = torch.jit.trace(function, *arguments, **options)
    attach_script_module_clear_hook(module._c)
    return module
