from audio.data import AudioData
from recipes import Evaluate, Model, Optim, Recipe, Recipes, Train

RECIPES = Recipes("audio")


def tiny(method: str) -> Recipe:
    """0.1M parameters, one second: five sounds in noise. Hardware: one CPU core."""
    return Recipe(
        f"audio.{method}_tiny",
        "audio",
        Model(f"audio_{method}_tiny"),
        AudioData(),
        optim=Optim(lr=2e-3, prior_lr_scale=10.0),
        train=Train(steps=300, batch=32, save_every=100),
        evaluate=Evaluate(every=100, samples=256),
    )


RECIPES.add_family("tiny", tiny)
