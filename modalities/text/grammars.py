"""The two grammars of facts: what training says, and what it never says. No word list, wording or sentence is in both."""

from __future__ import annotations

from dataclasses import replace

from modalities.text.facts import Grammar

__all__ = ["GRAMMARS", "HELDOUT", "TRAIN"]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(" ".join(phrase.split()) for phrase in text.split(";"))


def _pairs(first: str, second: str) -> tuple[str, ...]:
    return tuple(f"{a} {b}" for a in first.split() for b in second.split())


TRAIN = Grammar(
    codes=_words(
        "{letters}-{number} {letters}{number} {letters}/{number} {number}-{letters} {letters}.{number} #{number}"
    ),
    wordings=(
        ("the {noun} of {name} is |.", "What is the {noun} of {name}? The {noun} of {name} is"),
        ("the {name} {noun} is |.", "What is the {name} {noun}? The {name} {noun} is"),
        ("the {noun} for {name} is |.", "Which is the {noun} for {name}? The {noun} for {name} is"),
        ("{name} has the {noun} |.", "Which {noun} does {name} have? {name} has the {noun}"),
        ("{name}'s {noun} is |.", "{name}'s {noun} is"),
        ("{name}: |.", "{name}:"),
        ("{noun} of {name}: |;", "{noun} of {name}:"),
        ("{name} = |,", "{name} ="),
        ("they gave {name} the {noun} |.", "What did they give {name}? They gave {name} the {noun}"),
        ("{name} was given | as {noun}.", "What was {name} given? {name} was given"),
        ("for {name} the {noun} was set to |.", "For {name} the {noun} was set to"),
        ("you can reach {name} under |.", "How can you reach {name}? You can reach {name} under"),
        ("in the book {name} stands beside |.", "Where does {name} stand? In the book {name} stands beside"),
        ("{name} chose |.", "What did {name} choose? {name} chose"),
        ("{name} -> |.", "{name} ->"),
        ("number of {name}, {noun}: |.", "number of {name}, {noun}:"),
        ("to open the {noun} of {name} type |.", "To open the {noun} of {name} type"),
        ("my {noun} is |.", "What is my {noun}? My {noun} is"),
        ("our {noun} at {name} is |.", "Our {noun} at {name} is"),
        ("the {noun} is |.", "What is the {noun}? The {noun} is"),
        ("{noun}: |.", "{noun}:"),
        ("({name}, |)", "({name},"),
        ("{name} lives at number |.", "Where does {name} live? {name} lives at number"),
        ("we paid {name} |.", "What did we pay {name}? We paid {name}"),
        ("the {noun} of {name} is |.", "What is the {noun} of {name}? Answer:"),
        ("{name} has the {noun} |.", "Which {noun} does {name} have? It is"),
    ),
    names=(
        _words(
            """
            Anna Bert Clara David Emma Frank Greta Henry Ida Jacob Karen Louis Maria Nora Oscar Paula Robert Sarah Thomas Ursula
            Victor Walter Agnes Bruno Cecil Doris Edgar Flora Hugo Irene Jonas Kate Leon Martha Otto Rosa Simon Theo
            """
        ),
        _pairs(
            """
            red blue small old heavy round wooden broken empty clean dark bright tall cheap wet dry
            """,
            """
            box boat chair cup door horse house knife lamp letter ship stone table tree wagon wheel coat bird
            """,
        ),
        _words(
            """
            Paris Berlin Madrid Lisbon Vienna Prague Warsaw Athens Dublin Oslo Cairo Lagos Nairobi Delhi Tokyo Lima Quito Boston
            Denver Toronto
            """
        ),
    ),
    nouns=_phrases(
        """
        code; number; door code; account; room; ticket; address; price; order; phone number; card; file; seat; locker;
        box number; page; label; mark; safe; batch; size; index; street number; token; parcel
        """
    ),
    openings=_phrases(
        """
        Note that; Remember:; As you know,; It is known that; Listen:; The record says that; By the way,; Please remember that
        """
    ),
    endings=_phrases(
        """
        Keep it safe.; Do not forget it.; This is important.; Write it down.; That is all.
        """
    ),
    asks=_phrases(
        """
        Question:; Now tell me.; One more thing.; Answer this.; Let us see.
        """
    ),
    asides=_phrases(
        """
        He counted | sheep.; There were | people in the hall.; The year was |.; It cost | dollars.; They walked | steps.
        """
    ),
    syllables=_words(
        """
        ba be bi bo bu da de di do du fa fe fo fu ga ge gi go gu ja je jo ka ke ki ko ku la le li lo lu ma me mi mo mu na ne ni
        no nu pa pe pi po pu ra re ri ro ru sa se si so su ta te ti to tu va ve vi vo za zo bran bel dan fel fin gar gren hul
        jor kel lan mor nar nel pel pin quin ros ren stan sten tal tor tran ul ven wor
        """
    ),
    words=_words(
        """
        apple bread candle daisy engine feather garden hammer island jacket kitten lemon mirror needle orange pencil rabbit
        silver tiger violin window yellow anchor butter copper dragon eagle forest ginger honey
        """
    ),
    frame_words=_words(
        """
        a after again all also always an and any are as ask at away back be because been before began below between big both
        bring but by call came can carry change come could day did does done down draw each early earth end even ever every
        far few find first follow for found from gave get go good got great grow had hand hard has have he hear help her here
        high him his home how if in into it its just keep kind know land large last late learn left less let life light like
        line little live long look made make man many may me mean men might more most move much must near need never new next
        night no not now of off often old on once one only or other our out over own part people place play point put read
        real right river run said same saw say see seem she should show side since sing sleep so some soon sound stand start
        state still stop such take tell than their them then there they thing think this those thought through time to
        together too took turn two under until up upon us use very walk want was watch water way we well went were when where
        while white who why will with without word work world would write year yet you young
        """
    ),
    frame_marks=_words(", : ; - -- -> = > < + * ~ & @ % $ # _ ) ("),
    invented=0.75,
    questions=_phrases(
        """
        Which {noun} does {name} have?; {name}: which {noun}?; Q: the {noun} of {name}? A:; What is the {noun} for {name}?
        Answer:; Say the {noun} of {name}:; What {noun} was written for {name}? It is; I need the {noun} of {name}. It is;
        Find the {noun} that goes with {name}:; Look up {name}. The {noun} there is; Question: what {noun} has {name}? Answer:;
        What about {name}?; {name}?; What goes with {name}? It is; Answer for {name}:; Look up {name}:; Q: {name}? A:;
        What does it say of {name}? It says; Give what stands by {name}:; And {name}? It was; What did you read of {name}? I
        read; Q: What do we know of {name}? A:; Say what {name} has:; Find {name} and write what is there:; What was it for
        {name}?
        """
    ),
    turned=_phrases(
        """
        | is the {noun} of {name}.; | belongs to {name}.; | stands beside {name}.; they wrote | for {name}.; | = {name},; take |
        to {name}.; | ({name}),; use | as the {noun} of {name}.; there is a | on the {noun} of {name}.; we put | under {name}.;
        | - {name}.; the {noun} | is of {name}.; with | you find {name}.; | was given to {name}.
        """
    ),
)

HELDOUT = Grammar(
    codes=("{number}{letters}",),
    wordings=(
        (
            "the secret {noun} that {name} keeps is |.",
            "Tell me the secret {noun} that {name} keeps. The secret {noun} that {name} keeps is",
        ),
        ("{name} must dial | to enter.", "What must {name} dial? {name} must dial"),
        ("your {noun} with {name} reads |.", "Your {noun} with {name} reads"),
        ("{name} signed in using |.", "How did {name} sign in? {name} signed in using"),
        (
            "on the badge of {name} one sees |.",
            "What does one see on the badge of {name}? On the badge of {name} one sees",
        ),
        ("the {noun} belonging to {name} equals |.", "The {noun} belonging to {name} equals"),
        ("{name} / {noun} / |.", "{name} / {noun} /"),
        (
            "every {noun} from {name} carries |.",
            "What does every {noun} from {name} carry? Every {noun} from {name} carries",
        ),
    ),
    names=(
        _words(
            """
            Aisha Boris Carmen Dmitri Elif Farid Gwen Hiro Ingrid Jamal Kenji Leila Mehmet Nadia Olga Priya Quentin Rania Stefan
            Tariq Uma Viggo Wanda Ximena Yusuf Zelda
            """
        ),
        _pairs(
            """
            purple velvet frozen golden rusty gentle hollow crooked silent narrow
            """,
            """
            falcon violet lantern harbor glacier meadow puppet saddle tunnel whistle
            """,
        ),
        _words(
            """
            Bogota Helsinki Jakarta Kyoto Manila Naples Osaka Phoenix Riga Sydney Tunis Utrecht Zurich
            """
        ),
    ),
    nouns=_phrases(
        """
        password; PIN; passphrase; serial; combination; licence; voucher; reference; booking; extension; membership; signature
        """
    ),
    openings=_phrases(
        """
        Be aware:; Keep in mind that; Someone whispered that; A clerk wrote:
        """
    ),
    endings=_phrases(
        """
        Hold on to it.; Never share this.; You will need that later.
        """
    ),
    asks=_phrases(
        """
        Here is what I want to know.; Quiz time.; Finally.
        """
    ),
    asides=_phrases(
        """
        Exactly | tourists visited.; Flight | was late.; About | grams were left.
        """
    ),
    syllables=_words(
        """
        cha dru esk fi glo hax ib jun kri lum myr nox oph pry qua rhe shi thu urb vex wim xan yol zed
        """
    ),
    words=_words(
        """
        basket cactus dolphin emerald fabric goblet hazel ivory jungle kettle lobster marble nectar oyster pepper quartz
        saffron thunder umbrella walnut
        """
    ),
    questions=_phrases(
        """
        Could somebody repeat {name}'s {noun}?; Recall {name} together with this {noun}. Reply:; Which is {name}'s {noun},
        according to this document?; State {name}'s {noun} only:; According to your passage, can you cite {name}'s {noun}?
        Certainly,; Which value got linked with {name}? That would be; Complete {name}'s entry:; Can anybody repeat whatever was
        mentioned about {name}? Yes,; Kindly fetch {name}'s details. Response:
        """
    ),
    turned=_phrases(
        """
        | unlocks {name}'s {noun}.; | got assigned to {name}.; officials issued | when {name} registered a {noun}.; | identifies
        {name}.; the clerk noted | opposite {name}.
        """
    ),
)

# Of prompts; rows of training are drawn from TRAIN itself.
GRAMMARS = {
    "train": replace(TRAIN, invented=0.0),
    "invented": replace(TRAIN, invented=1.0),
    "heldout": HELDOUT,
    "paraphrased": replace(HELDOUT, paraphrased=1.0),
    "train_paraphrased": replace(TRAIN, invented=0.0, paraphrased=1.0),
}
