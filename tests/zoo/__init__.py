"""A zoo of faults between sampler and trainer, made by really running things differently.

The doctor (`insight.doctor`) names the cause of a mismatch. Here it is judged from outside: an inference server and
a trainer that share no code with the package (`machines`: `generate` and eager modules of Hugging Face) take real steps
with one thing wrong (`faults`): another temperature, weights that did not arrive, logprobs in base 2, a batch sorted
and never put back. No recorded series is ever edited; what a bug does to numbers, the code of the bug does.

Each case says what a right answer is: one cause of `causes.FIXES`, or several that are equally right, or `NONE`, or for
clean steps `CLEAN`. One part (`build`) is there to improve the doctor by. Many kinds of `unseen` are in it only, the
rest come with other seeds and strengths. Both have been judged: a doctor that must be judged anew needs other kinds.

Each case says how large it is: the largest and the mean gap in nats, the mean total variation between the law that
tokens were drawn from and the one that the client asked for, with what all tokens together say for it in nats, and how
far they are from a draw as claimed in standard deviations. What is below the noise can be seen there.

    python -m tests.zoo build                    # a table, and a row per kind
    python -m tests.zoo build --only temperature -v
    python -m tests.zoo build --http --first     # the server behind HTTP, one case of each kind: 20 minutes
    python -m tests.zoo unseen --dry -v          # run the cases, ask no doctor, say how large each is
"""
