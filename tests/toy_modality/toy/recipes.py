from recipes import Evaluate, Model, Optim, Recipe, Recipes, Train
from toy.data import ToyData

RECIPES = Recipes("toy")


@RECIPES.add
def tiny() -> Recipe:
    """Seconds on a CPU: python recipes/train.py toy.tiny"""
    train = Train(steps=8, batch=8, save_every=4)
    evaluate = Evaluate(every=4, samples=32)
    return Recipe(
        "toy.tiny", "toy", Model("toy_tiny"), ToyData(), Optim(lr=1e-2, warmup=2), train, evaluate
    )
