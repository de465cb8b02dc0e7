"""A question with its examples, as one text to continue or as a conversation."""

from dataclasses import dataclass

Message = dict[str, str]


@dataclass(frozen=True)
class Prompt:
    """A question behind its shots.

    Attributes:
        shots: questions and answers; an answer begins with what separates it from its question.
        question: as the shots' questions.
        intro: in front of everything, in the completion style.
        instruction: in front of each question, in the chat style.
    """

    shots: tuple[tuple[str, str], ...]
    question: str
    intro: str = ""
    instruction: str = ""

    def text(self, dropped: int = 0) -> str:
        """The text to continue, without the first `dropped` shots."""
        return self.intro + "".join(f"{ask}{answer}\n\n" for ask, answer in self.shots[dropped:]) + self.question

    def messages(self, dropped: int = 0) -> list[Message]:
        """The same as a conversation that waits for the assistant."""
        said = [
            message
            for ask, answer in self.shots[dropped:]
            for message in (_user(self.instruction + ask), {"role": "assistant", "content": answer.strip()})
        ]
        return [*said, _user(self.instruction + self.question)]


@dataclass(frozen=True)
class Output:
    """What came back for a prompt.

    Attributes:
        text: without the end token; empty if there is an error.
        finish_reason: "stop" or "length".
        prompt_tokens, output_tokens: how many; 0 if a server does not say.
        dropped_shots: shots left out in front so that the prompt fitted.
        thinking: the prompt had opened a think block.
        error: why there is no output; None if there is one.
        logprobs: of the choices, where those were asked for and no text.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    dropped_shots: int = 0
    thinking: bool = False
    error: str | None = None
    logprobs: tuple[float, ...] | None = None


def _user(content: str) -> Message:
    return {"role": "user", "content": content}
