"""Public knowledge: everything that is computed from the public set Q alone, and so costs no privacy.

Read `features` first (fixed feature maps, fitted on Q), with `patches`, `scattering` and `projection`; then `start`
(a model trained on Q's labels), `augment` (variants of images), `cache` (results on disk) and `knowledge` (all parts
together, as a run uses them).
"""
