"Services that are wrong in one way: an emulator behind a layer that changes what goes in or what comes out."

from itertools import pairwise

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from rl_notebook.emulator.service import Emulator, RunningEmulator


class Layer:
    "An ASGI application in front of another, which may rewrite passes and their answers."

    def __init__(self, app, wrong):
        self.app, self.wrong = app, wrong

    def __getattr__(self, name):
        return getattr(self.app, name)

    def __setattr__(self, name, value):
        super().__setattr__(name, value) if name in ("app", "wrong") else setattr(self.app, name, value)

    async def __call__(self, scope, receive, send):
        headers = dict(scope.get("headers", ()))
        path = scope.get("path", "")
        if path.endswith("/api/v1/forward_backward"):
            return await self.app(*await self.rewritten(scope, receive), send)
        if path.endswith("/retrieve_future") and headers.get(b"x-tinker-request-type", b"").startswith(b"Forward"):
            return await self.app(scope, receive, self.rewriting(send))
        return await self.app(scope, receive, send)

    async def rewritten(self, scope, receive):
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        request = pb.ForwardBackwardRequest.FromString(body)
        self.wrong.asked(request)
        body = request.SerializeToString()
        headers = [(k, v) for k, v in scope["headers"] if k != b"content-length"]
        once = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def again():
            return next(once, {"type": "http.disconnect"})

        return {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}, again

    def rewriting(self, send):
        start, parts = {}, []

        async def changed(message):
            if message["type"] == "http.response.start":
                start.update(message)
                return
            parts.append(message.get("body", b""))
            if message.get("more_body"):
                return
            headers, body = dict(start["headers"]), b"".join(parts)
            if b"protobuf" in headers.get(b"content-type", b""):
                output = pb.ForwardBackwardOutput.FromString(body)
                self.wrong.answered(output)
                body = output.SerializeToString()
            kept = [(k, v) for k, v in start["headers"] if k != b"content-length"]
            await send({**start, "headers": [*kept, (b"content-length", str(len(body)).encode())]})
            await send({"type": "http.response.body", "body": body})

        return changed


class Right:
    "Changes nothing."

    def asked(self, request):
        pass

    def answered(self, output):
        pass


class Negated(Right):
    "Minimises what should be maximised."

    def asked(self, request):
        for datum in request.data:
            scale(datum.loss_fn_inputs["weights"], -1.0)


class Shifted(Right):
    "Answers with the logprob of the token before."

    def answered(self, output):
        for field in (r.fields["logprobs"] for r in output.loss_fn_outputs):
            ends = np.frombuffer(field.offsets, dtype=np.int64) // 4
            values = np.frombuffer(field.data, dtype=np.float32).copy()
            for a, b in pairwise(ends):
                values[a:b] = np.roll(values[a:b], 1)
            field.data = values.tobytes()


class Averaged(Right):
    "Divides a sequence's loss by the sum of its weights, and the gradient by the number of sequences."

    def asked(self, request):
        if request.forward_only:
            return
        for datum in request.data:
            inputs = datum.loss_fn_inputs
            mask = numbers(inputs["weights"])
            carrier = "weights" if request.loss_fn == "cross_entropy" else "advantages"
            scale(inputs[carrier], 1 / max(float(mask.sum()), 1e-9) / len(request.data))
            if carrier == "advantages":
                del inputs["weights"]


def numbers(tensor):
    return np.frombuffer(tensor.dense, dtype=np.float32)


def scale(tensor, factor):
    tensor.dense = (numbers(tensor) * np.float32(factor)).tobytes()


def start_wrong(wrong, **options):
    "A running emulator that is wrong."
    emulator = Emulator(**options)
    emulator.app = Layer(emulator.app, wrong)
    return RunningEmulator(emulator)
