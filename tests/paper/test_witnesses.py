"""Where the paper's own arguments about its witnesses do not show what they say."""

import torch


def test_two_symmetric_points_do_not_show_that_t_pos_has_positions(load_script):
    """The paper's example for T_pos: swapping two points swaps the outputs, as a permutation-equivariant map does."""
    distance = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    u = torch.eye(2)
    swap = [1, 0]
    torch.testing.assert_close(distance @ u[swap] / 2, (distance @ u / 2)[swap])
    assert load_script("witnesses").position_weighted().gap > 0.1


def test_a_recurrence_of_one_state_has_outputs_in_no_one_dimensional_space():
    """What the paper's argument for H_n says; the Hankel block is what has rank n."""
    time = torch.arange(16)
    matrix = (0.9 ** (time[:, None] - time).clamp(min=0)).tril()  # h_t = 0.9 h_(t-1) + u_t
    assert torch.linalg.matrix_rank(matrix) == 16
    assert torch.linalg.matrix_rank(matrix[8:, :8]) == 1
