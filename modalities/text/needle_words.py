"""Words that needle keys are made of: "amber-lantern", "quiet-harbor". Changing them changes every RULER prompt."""

_ADJECTIVES = """
amber ancient autumn bitter bold brave bright brisk broad calm clever coastal cold copper crimson curious distant
early eager even faint fair famous fertile fine firm fond frozen gentle giant golden grand green hasty hidden hollow
honest humble icy idle ivory jolly keen kind large late lively lonely loyal lucky mellow mighty modest narrow noble
northern odd open pale patient plain polite proud quick quiet rapid rare ready restless ripe rough royal rustic sandy
scarlet secret shady sharp silent silver simple sleepy slender slow smooth sober solid spare stable stormy sturdy
subtle sudden sunny swift tall tame tender thick tidy tiny upper vast velvet vivid warm weary wild windy wise young
"""
_NOUNS = """
acorn anchor apple arrow badger barrel basket beacon bell birch blanket bottle bridge brook bucket button cabin candle
canyon carpet castle cedar chapel cherry clover comet compass cottage cradle cricket crown dagger desert dolphin drum
eagle ember engine falcon feather ferry fiddle forest fountain fox garden garnet glacier goblet granite hammer harbor
hazel heron hill island jacket jewel kettle ladder lagoon lantern lemon lily lizard magnet maple marble market meadow
mirror morning needle oak olive orchard otter oyster paddle parade pebble pepper pigeon pillow planet pocket prairie
quarry quilt rabbit raven ribbon river saddle sailor shadow shell shovel spider spruce statue summit temple thimble
thunder tiger tunnel turnip valley violin wagon walnut willow window winter wolf
"""

ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())
