"""A conversation with the model: what was said, as much of it as the model can see."""

from collections.abc import Callable, Iterator

from mindspeed_llm.data.conversation import Message
from mindspeed_llm.generation.engine import Step
from mindspeed_llm.generation.session import Session
from mindspeed_llm.generation.text import Stream


class Conversation:
    """Asks questions and remembers the answers."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._said: list[Message] = []
        self._asked = 0
        self.dropped = 0
        """Earlier turns that the last question left no room for."""

    def clear(self) -> None:
        """Forget what was said."""
        self._said.clear()

    def ask(self, question: str, stop: Callable[[], bool]) -> Iterator[str]:
        """Return the pieces of the answer as they come; what `stop` leaves of it is remembered."""
        prompt = self._fit(Message("user", question))
        request = self._session.request("chat", [prompt], self._asked)
        self._asked += 1
        return self._speak(question, self._session.engine.answer(request, stop))

    def _speak(self, question: str, steps: Iterator[Step]) -> Iterator[str]:
        stream = Stream(self._session.text)
        for ((_, token),) in steps:
            if piece := stream.feed(token):
                yield piece
        yield stream.rest()
        if stream.whole.strip():  # a turn without an answer would confuse the next one
            self._said += [Message("user", question), Message("assistant", stream.whole)]

    def _fit(self, question: Message) -> list[int]:
        """Encode the question behind the newest turns for which there is room."""
        session = self._session
        turns = len(self._said) // 2
        kept = min(session.options.history_turns, turns)
        self._said = self._said[2 * (turns - kept) :]
        # Turns make way for an answer of full length, but not for more than half of all.
        wanted = min(session.options.max_new_tokens, session.limit // 2)
        self.dropped = 0
        while True:
            prompt = session.text.encode_chat([*self._said, question])
            if len(prompt) + wanted <= session.limit or not self._said:
                return prompt
            del self._said[:2]
            self.dropped += 1
