"Planted bug: the inference server renders the conversation itself, with another system prompt."

from dataclasses import replace

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_reward, toy_rows


class ChatServer:
    "Our inference server: takes messages."

    def __init__(self, engine, tokenizer):
        self.engine = engine
        self.tokenizer = tokenizer

    def rendered(self, question):
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": question},
        ]
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def sample(self, prompt_tokens, params):
        question = self.tokenizer.decode(prompt_tokens, skip_special_tokens=True)
        completions = await self.engine.sample(self.rendered(question), params)
        # the server does not send the prompt back
        return [replace(c, prompt_tokens=prompt_tokens) for c in completions]

    async def logprobs(self, tokens):
        return await self.engine.logprobs(tokens)


async def train():
    backend = open_local(*load_model("tiny"))
    backend.sampler = ChatServer(backend.sampler, backend.tokenizer)
    cfg = Config(
        prompt_groups_per_step=4,
        completions_per_prompt=6,
        max_completion_tokens=24,
        learning_rate=1e-3,
    )
    loop = GRPOLoop(backend, toy_rows(40), toy_reward, cfg)
    await loop.run(1)
    return loop
