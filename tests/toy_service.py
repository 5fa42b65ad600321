"A training service of a hundred lines: a table of bigrams with a client like the SDK's, made to fail anywhere."

from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np

from rl_notebook.backends.services.link import Sdk

VOCAB = 6


class Dropped(Exception):
    "The connection broke."


class Refused(Exception):
    "The service says no."

    category = "user"


TOY = Sdk(
    name="toy",
    Datum=lambda **fields: SimpleNamespace(**fields),
    ModelInput=SimpleNamespace(from_ints=lambda ids: ids),
    TensorData=lambda **fields: SimpleNamespace(**fields),
    AdamParams=lambda **fields: SimpleNamespace(**fields),
    errors=(Dropped, Refused),
)


class Service:
    "What outlives a client: saved states, a plan of faults, and a count of what was executed."

    def __init__(self, faults=()):
        self.states = {}
        self.faults = dict(faults)
        self.requests = 0
        self.opened = 0
        self.deleted = []

    def connect(self):
        self.request("connect", lambda: None).result()
        self.opened += 1
        return Client(self)

    def request(self, name, do):
        "Run `do` and answer; a fault drops the request `before` or `after` it was executed."
        future = Future()
        fault = self.faults.pop(self.requests, None)
        self.requests += 1
        try:
            if fault == "before":
                raise Dropped(name)
            value = do()
            if fault == "after":
                raise Dropped(name)
            future.set_result(value)
        except Exception as error:
            future.set_exception(error)
        return future


class Client:
    "Logprobs, gradients and Adam of a table of bigrams."

    def __init__(self, service):
        self.service = service
        self.table = np.sin(np.arange(VOCAB**2, dtype=float)).reshape(VOCAB, VOCAB)
        self.m = 0.0
        self.v = 0.0
        self.steps = 0
        self.grad = np.zeros((VOCAB, VOCAB))

    def scores(self, data):
        for d in data:
            if max([*d.model_input, *d.loss_fn_inputs["target_tokens"].data]) >= VOCAB:
                raise Refused("unknown token")
        rows = [self.table[d.model_input] for d in data]
        return [r - np.log(np.exp(r).sum(1, keepdims=True)) for r in rows]

    def outputs(self, data):
        picked = [
            r[np.arange(len(r)), d.loss_fn_inputs["target_tokens"].data]
            for d, r in zip(data, self.scores(data), strict=True)
        ]
        records = [{"logprobs": SimpleNamespace(data=p.tolist())} for p in picked]
        return SimpleNamespace(loss_fn_outputs=records, metrics={})

    def forward(self, data, loss_fn):
        return self.service.request("forward", lambda: self.outputs(data))

    def forward_backward(self, data, loss_fn, config=None):
        def do():
            for d, r in zip(data, self.scores(data), strict=True):
                w = np.array(d.loss_fn_inputs["weights"].data)
                dlogprob = w[:, None] * np.exp(r)
                dlogprob[np.arange(len(r)), d.loss_fn_inputs["target_tokens"].data] -= w
                np.add.at(self.grad, d.model_input, dlogprob)
            outputs = self.outputs(data)
            for d, output in zip(data, outputs.loss_fn_outputs, strict=True):
                loss = -np.dot(d.loss_fn_inputs["weights"].data, output["logprobs"].data)
                outputs.metrics["loss:sum"] = outputs.metrics.get("loss:sum", 0.0) + loss
            return outputs

        return self.service.request("forward_backward", do)

    def optim_step(self, adam):
        def do():
            g, self.grad, self.steps = self.grad, np.zeros_like(self.table), self.steps + 1
            self.m = adam.beta1 * self.m + (1 - adam.beta1) * g
            self.v = adam.beta2 * self.v + (1 - adam.beta2) * g * g
            m = self.m / (1 - adam.beta1**self.steps)
            v = self.v / (1 - adam.beta2**self.steps)
            self.table = self.table - adam.learning_rate * m / (np.sqrt(v) + adam.eps)
            return SimpleNamespace(metrics={"grad_norm": float(np.linalg.norm(g))})

        return self.service.request("optim_step", do)

    def save_state(self, name):
        def do():
            if name in self.service.states:
                raise Refused(f"{name} exists")
            self.service.states[name] = (self.table, self.m, self.v, self.steps)
            return SimpleNamespace(path=name)

        return self.service.request("save_state", do)

    def load_state_with_optimizer(self, path):
        def do():
            if path not in self.service.states:
                raise Refused(f"no state {path}")
            self.table, self.m, self.v, self.steps = self.service.states[path]
            return SimpleNamespace(path=path)

        return self.service.request("load_state", do)

    def load_state(self, path):
        future = self.load_state_with_optimizer(path)
        if future.exception() is None:
            self.m = 0.0
            self.v = 0.0
            self.steps = 0
        return future

    def save_weights_for_sampler(self, name):
        return self.service.request("snapshot", lambda: SimpleNamespace(path=name))
