"""Which steps of a pass make an update together."""


class Accumulation:
    """The place of the present step in its update, which may consist of several steps.

    Attributes:
        first, last: whether the present step is the first, the last of its update.
        steps: how many make the present update.
        in_place: whether the loop has called `BaseModule.backward`, which adds up the gradients.
    """

    def __init__(self) -> None:
        self.first = self.last = True
        self.in_place = False
        self.steps = 1

    def begin(self) -> None:
        """A pass begins: an update that the one before it left in the middle is over."""
        self.first = self.last = True

    def over(self, number: int, of: int, each: int) -> None:
        """A step begins.

        Args:
            number: of the step in its pass, from 1.
            of: steps in the pass.
            each: steps per update; the last update of a pass may have fewer.
        """
        self.first, self.last = number % each == 1 or each == 1, number % each == 0 or number == of
        self.steps = min(each, of - (number - 1) // each * each)
