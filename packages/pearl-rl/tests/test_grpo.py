"""The objective against numbers worked out by hand."""

import math

import pytest

torch = pytest.importorskip("torch")

from pearl_rl.training.grpo import TokenScores, grpo_loss, k3_divergence, score_tokens  # noqa: E402
from pearl_rl.training.options import LossOptions  # noqa: E402

pytestmark = pytest.mark.torch
PLAIN = LossOptions()


def scores(logprobs, requires_grad=False):
    tensor = torch.tensor(logprobs, dtype=torch.float64, requires_grad=requires_grad)
    return TokenScores(tensor, torch.full_like(tensor, 0.5).detach())


def terms(new, behaviour, advantages, mask, weights, options=PLAIN, reference=None):
    return grpo_loss(
        new,
        torch.tensor(behaviour, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor(mask),
        torch.tensor(weights, dtype=torch.float64),
        options,
        None if reference is None else torch.tensor(reference, dtype=torch.float64),
    )


def test_token_logprobs_and_entropy_are_those_of_the_softmax_at_the_place_before():
    logits = torch.tensor([[[0.0, math.log(3.0)], [math.log(4.0), 0.0], [9.0, 9.0]]])
    result = score_tokens(logits, torch.tensor([[0, 1, 1]]))
    assert result.logprobs.tolist() == [pytest.approx([math.log(3 / 4), math.log(1 / 5)], abs=1e-6)]
    first = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    second = -(0.8 * math.log(0.8) + 0.2 * math.log(0.2))
    assert result.entropy.tolist() == [pytest.approx([first, second], abs=1e-6)]


def test_temperature_divides_the_logits():
    logits = torch.tensor([[[0.0, 2 * math.log(3.0)], [0.0, 0.0]]])
    assert score_tokens(logits, torch.tensor([[0, 1]]), temperature=2.0).logprobs.item() == pytest.approx(
        math.log(0.75)
    )


def test_the_gradient_of_a_token_is_minus_weight_times_truncated_ratio_times_advantage():
    new = scores([[math.log(0.5), math.log(0.9), math.log(0.2)]], requires_grad=True)
    behaviour = [[math.log(0.25), math.log(0.1), math.log(0.4)]]
    result = terms(new, behaviour, [2.0], [[True, True, True]], [0.25], LossOptions(truncation=3.0))
    result.loss.backward()
    # ratios 2, 9 (counts as 3), 0.5
    assert new.logprobs.grad.tolist() == [pytest.approx([-0.25 * 2 * 2, -0.25 * 3 * 2, -0.25 * 0.5 * 2])]
    assert result.loss.item() == pytest.approx(
        -0.25 * 2 * (2 * math.log(0.5) + 3 * math.log(0.9) + 0.5 * math.log(0.2))
    )
    assert result.limited.item() == 1
    assert result.importance_sum.item() == pytest.approx(11.5)
    assert result.tokens.item() == 3


def test_the_clip_stops_the_gradient_only_where_the_policy_moved_further_than_allowed_in_the_rewarded_direction():
    new = scores([[math.log(1.5), math.log(0.5)], [math.log(1.5), math.log(0.5)]], requires_grad=True)
    behaviour = [[0.0, 0.0], [0.0, 0.0]]
    options = LossOptions(clip_low=0.2, clip_high=0.3, truncation=2.0)
    result = terms(new, behaviour, [1.0, -1.0], [[True, True], [True, True]], [0.25, 0.25], options)
    result.loss.backward()
    # d ratio / d logprob = ratio; A > 0 at 1.5 is clipped, at 0.5 not; A < 0 the other way round.
    assert new.logprobs.grad.tolist() == [pytest.approx([0.0, -0.25 * 0.5]), pytest.approx([0.25 * 1.5, 0.0])]
    assert result.loss.item() == pytest.approx(-0.25 * (1.3 + 0.5 - 1.5 - 0.8))
    assert result.limited.item() == 2


def test_truncation_bounds_what_a_negative_advantage_can_do_under_the_clip():
    new = scores([[5.0]], requires_grad=True)
    options = LossOptions(clip_low=0.2, clip_high=0.2, truncation=2.0)
    result = terms(new, [[0.0]], [-1.0], [[True]], [1.0], options)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(2.0)
    assert new.logprobs.grad.item() == 0.0


@pytest.mark.parametrize("options", [LossOptions(), LossOptions(clip_low=0.2, clip_high=0.2)])
def test_masked_tokens_have_no_influence_whatever_their_values(options):
    new = scores([[-1.0, -math.inf, -2.0]], requires_grad=True)
    result = terms(new, [[-1.0, 0.0, math.nan]], [1.0], [[True, False, False]], [1.0], options)
    result.loss.backward()
    assert result.loss.isfinite()
    assert new.logprobs.grad.tolist() == [[-1.0, 0.0, 0.0]]
    assert result.tokens.item() == 1
    assert result.entropy_sum.item() == pytest.approx(0.5)


def test_a_wild_ratio_gives_a_finite_gradient():
    new = scores([[-1.0]], requires_grad=True)
    result = terms(new, [[-2000.0]], [-1.0], [[True]], [1.0], LossOptions(clip_low=0.2, clip_high=0.2))
    result.loss.backward()
    assert new.logprobs.grad.isfinite().all()


def test_rows_without_generated_tokens_give_a_zero_loss_with_a_gradient():
    new = scores([[-1.0, -1.0]], requires_grad=True)
    result = terms(new, [[0.0, 0.0]], [1.0], [[False, False]], [0.0])
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert new.logprobs.grad.tolist() == [[0.0, 0.0]]


def test_k3_is_zero_for_equal_policies_and_positive_otherwise():
    other = torch.tensor([math.log(0.5), math.log(0.25), math.log(0.75)], dtype=torch.float64)
    mine = torch.full((3,), math.log(0.5), dtype=torch.float64)
    expected = [0.0, 0.5 - math.log(0.5) - 1, 1.5 - math.log(1.5) - 1]
    assert k3_divergence(mine, other).tolist() == pytest.approx(expected)
    assert (k3_divergence(mine, other) >= 0).all()


def test_kl_and_entropy_enter_the_loss_with_their_coefficients():
    options = LossOptions(kl_coefficient=0.1, entropy_coefficient=0.01)
    reference = [[math.log(0.25)]]
    result = terms(scores([[math.log(0.5)]]), [[math.log(0.5)]], [0.0], [[True]], [1.0], options, reference)
    kl = 0.5 - math.log(0.5) - 1
    assert result.kl_sum.item() == pytest.approx(kl)
    assert result.loss.item() == pytest.approx(0.1 * kl - 0.01 * 0.5)


def test_the_entropy_bonus_flattens_the_distribution():
    logits = torch.tensor([[[2.0, 0.0], [0.0, 0.0]]], requires_grad=True)
    tokens = torch.tensor([[0, 0]])
    new = score_tokens(logits, tokens, entropy_gradient=True)
    mask, zero = torch.tensor([[True]]), torch.zeros(1)
    grpo_loss(
        new, new.logprobs.detach(), zero, mask, torch.ones(1), LossOptions(entropy_coefficient=1.0)
    ).loss.backward()
    assert logits.grad[0, 0, 0] > 0 > logits.grad[0, 0, 1]
