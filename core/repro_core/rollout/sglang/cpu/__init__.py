"""Stand-ins that let SGLang run on a machine without a GPU. This folder goes to the end of ``sys.path``, nothing more.

SGLang's CPU build needs a compiled kernel package for one family of processors, and torchvision. For text models the
first can be replaced by plain torch and the second by nothing. What replaces what:

============================  ======================================================================================
``torchvision``               Nothing: names that SGLang imports and never calls for text. Every call raises.
``sgl_kernel``                SGLang's compiled kernels: the table of token slots and the hash of seeded sampling, both
                              in plain torch. Every other name raises when called, and no other operator is
                              registered, so that SGLang takes the plain torch way through each layer.
``repro_sglang_cpu``          A plugin that SGLang loads in each of its processes. In deterministic mode it allows the
                              attention backend ``torch_native``, and in place of SGLang's batch-invariant operators,
                              which are Triton kernels, it pads matrix products to rows in multiples of 16, so that
                              a row's sum in fp32 is ordered alike in every batch. Captured experts go into plain
                              memory, which SGLang would register with CUDA.
============================  ======================================================================================

Each refuses to load where torch sees a GPU. A package that is really installed comes before its stand-in.
`repro_core.rollout.sglang.stand_ins` lists those that an engine rests on, and an engine's identity carries that list.
"""

from __future__ import annotations

__all__: list[str] = []
