"""A plan in about one second of the processor for 500 activations, which a full search may refine later.

The stages are those of the full search, each once and small. The program is coarse: the step in few pieces, so that
repeated blocks merge into classes. It is built and solved in about a tenth of a second and stays a relaxation, so its
bound holds; what it rounds wrongly is put right on the evaluator.
"""

from __future__ import annotations

from ..contract import OPTIMAL_GAP, PolicyOutcome
from .leanest import try_few_swaps, try_leanest
from .local_search import Effort, improve, improve_in_batches
from .programs import Detail, Programs
from .rules import fit_rule, rule_by_cost
from .trials import Trials

COARSE = Detail(pieces=8, merge=True, gap=0.01, nodes=1)
ROUNDS = 2  # programs solved at most
PATIENCE = 0.5  # of the one rule: recompute where a replay takes at most half of the copies
RULE_STEPS = 64  # it is fitted to this fraction of the activations
PLAYED_OPS = 60_000  # in about half of the simulations that improve the plan
WIDE_GAP = 0.2  # to the bound, above which improving is repeated
WORTHWHILE = 0.95  # of the time before, as long as it gets at least so much better
MOST_IMPROVEMENTS = 5
FEW_SWAPS_SHARE = 4  # of the evaluations of one improvement, to look for a plan with few swaps
FEWEST_TRIALS = 12  # the same in simulations, however long the step is
NOTE = "planned with little effort: a full search may find a faster plan"


def fast_search(trials: Trials) -> PolicyOutcome:
    """Find a good plan with few evaluations, and a lower bound for all plans.

    Args:
        trials: of the request, with the plans that are known already.

    Raises:
        InfeasibleBudget: no plan was found, neither by these means nor by looking for the leanest one.
        KeyboardInterrupt: Ctrl-C was pressed before any plan fitted; later the best plan so far is the answer.
    """
    request, programs = trials.request, Programs(trials, COARSE)
    try:
        request.report("trying a simple rule", 0.1)
        rule = rule_by_cost(trials.candidates, PATIENCE)
        fit_rule(trials, rule, len(rule.leaving) // RULE_STEPS)
        for number in range(ROUNDS):
            request.report(f"solving a coarse program, round {number + 1}", 0.3 + 0.2 * number)
            decisions = programs.solve(number)
            if decisions is None or (trial := trials.run(decisions)).fits:
                break
            programs.correct(trial)
        if trials.best is None:
            _try_swaps_or_leanest(trials)
        request.report("improving the plan", 0.7)
        _improve(trials, programs)
    except KeyboardInterrupt:
        if trials.best is None:
            raise
        return programs.outcome(NOTE).stopped()
    return programs.outcome(NOTE)


def _try_swaps_or_leanest(trials: Trials) -> None:
    """The last resort: swap all or, where that does not fit, the plan that needs the fewest bytes.

    Raises:
        InfeasibleBudget: even that one does not fit.
    """
    if not trials.run(trials.candidates.all_of("swap")).fits:
        try_leanest(trials)


def _improve(trials: Trials, programs: Programs) -> None:
    """Many changes at a time, once more where the plan is far from the bound, and then some changes one by one.

    All of that again while the plan is very far from the bound and gets better, as where only swapping everything was
    found to fit, over a slow link. Where that ends far from the bound, a plan with few swaps is the next start.
    """
    evaluations = max(FEWEST_TRIALS, PLAYED_OPS // trials.request.dataflow.end)
    _improve_repeatedly(trials, programs, evaluations)
    if programs.gap > WIDE_GAP:
        start = try_few_swaps(trials, FEW_SWAPS_SHARE * evaluations)
        if start is not None:
            improve(trials, Effort(evaluations, passes=1, starts=1), programs.bound_ms, starts=[start])
            _improve_repeatedly(trials, programs, evaluations)


def _improve_repeatedly(trials: Trials, programs: Programs, evaluations: int) -> None:
    for _ in range(MOST_IMPROVEMENTS):
        before_ms = trials.best_ms
        improve_in_batches(trials, evaluations // 3)
        if programs.gap <= OPTIMAL_GAP:
            return
        improve_in_batches(trials, evaluations // 3)
        improve(trials, Effort(evaluations // 2, passes=1, starts=1), programs.bound_ms)
        if programs.gap <= WIDE_GAP or trials.best is None or trials.best_ms > WORTHWHILE * before_ms:
            return
