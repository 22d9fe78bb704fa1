"""The protocol of the parameter server, independent of its transport. Pure."""

from distkit.lazy import attributes

__getattr__ = attributes(
    __name__, {}, {name: f"{__name__}.{name}" for name in ("lr_scheduler", "optimizer")}
)
