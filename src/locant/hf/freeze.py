"""Train an attached encoding alone."""

from __future__ import annotations

from locant.hf.attach import Model
from locant.hf.attachment import attachments


def freeze_host(model: Model) -> Model:
    """Let only what was attached learn, in place; returns the model. ``model.requires_grad_(True)`` undoes it.

    Raises: ValueError where nothing is attached, or what is attached has nothing to learn (ALiBi, RoPE, sinusoids).
    """
    found = attachments(model)
    if not found:
        raise ValueError(
            f"freeze_host: {type(model).__name__} has nothing attached; call locant.hf.attach(model, name) first"
        )
    own = [p for _, _, attachment in found for p in attachment.parameters()]
    if not own:
        raise ValueError(
            f"freeze_host: {found[0][2].stack.name!r} has no parameters, so nothing would learn; attach an encoding "
            "that has some, or train the host"
        )
    model.requires_grad_(False)
    for parameter in own:
        parameter.requires_grad_(True)
    return model
