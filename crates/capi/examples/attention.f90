! Causal attention of a whole sequence in this process, over two ranks.
program attention_example
  use, intrinsic :: iso_c_binding
  use annulus
  implicit none
  integer, parameter :: batch = 1, length = 256, heads = 4, head_dim = 16
  type(annulus_options) :: options
  type(c_ptr) :: attention, plan
  real(c_float) :: q(head_dim, heads, length, batch), k(head_dim, heads, length, batch)
  real(c_float) :: v(head_dim, heads, length, batch), out(head_dim, heads, length, batch)
  real(c_float) :: lse(length, heads, batch)

  call check(annulus_options_default(options))
  options%batch = batch
  options%q_len = length
  options%kv_len = length
  options%q_heads = heads
  options%kv_heads = heads
  options%head_dim = head_dim
  options%value_dim = head_dim
  options%causal = 1
  call check(annulus_attention_create(options, attention))
  call check(annulus_plan_create_threads(attention, 2_c_int64_t, plan))
  q = 0.5
  k = 0.25
  v = 1.5
  call check(annulus_forward(plan, q, k, v, out, lse))
  print '(a, f8.5, a, f8.5)', 'out', out(1, 1, length, 1), ', lse', lse(length, 1, 1)
  call check(annulus_plan_destroy(plan))
  call check(annulus_attention_destroy(attention))
contains
  subroutine check(status)
    integer(c_int), intent(in) :: status
    if (status == ANNULUS_SUCCESS) return
    print '(a)', annulus_message()
    error stop 1
  end subroutine check
end program attention_example
