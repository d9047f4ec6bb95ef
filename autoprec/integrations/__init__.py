"""A policy in the frameworks people train with: one small module each, over `apply` and `training`.

    lightning.py     Lightning and Fabric: precision plugins
    accelerate.py    Accelerate: what `prepare` must not do twice, the policy's grad scaler and optimizer settings
    trainer.py       Transformers: a `Trainer` that trains under a policy
    fsdp2.py, zero.py            torch's own sharding: of parameters, of optimizer states
    deepspeed_config.py, launch_files.py, onnx.py    what `autoprec export` writes

Each framework is an extra and is imported only in its own module, never here; without it the import of that module
raises an `ImportError` that names the install line. Nothing here imports the search.
"""
