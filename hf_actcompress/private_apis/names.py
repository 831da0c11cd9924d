"""All private names of torch, transformers and diffusers that this package uses: for what, and since which version."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrivateAPI:
    """One private name.

    Args:
        name: An expression that finds it.
        since: The version of that library of which it is known; the oldest supported one if it is older.
        purpose: What it is used for.
    """

    name: str
    since: str
    purpose: str


_T, _H = "torch 2.11", "transformers 5.17"

PRIVATE_APIS: tuple[PrivateAPI, ...] = (
    # autograd
    PrivateAPI("torch._C._autograd._top_saved_tensors_default_hooks", _T, "which saved-tensor hooks are innermost: the "
               "border of a checkpointed region, and the hooks that ours hand on to"),
    PrivateAPI("torch._C._autograd._pop_saved_tensors_default_hooks", _T, "our ops without the net's hooks"),
    PrivateAPI("torch._C._autograd._push_saved_tensors_default_hooks", _T, "the net's hooks on again"),
    PrivateAPI("torch.autograd._profiler_enabled", _T, "a second profiler would end the first"),
    PrivateAPI("torch.ones(1)._post_accumulate_grad_hooks", _T, "who uses a gradient as soon as it is there"),
    PrivateAPI("torch._C._autograd._unsafe_set_version_counter", _T, "adapters of experts are "
               "registered and write nothing"),
    PrivateAPI("torch._C._autograd._saved_tensors_hooks_is_enabled", _T, "saved-tensor hooks may be installed"),
    PrivateAPI("torch.utils.checkpoint._CheckpointFrame(None, True, None, None).recompute_fn", _T,
               "what both runs of a checkpointed region have in common"),
    PrivateAPI("torch._C._current_graph_task_id", _T, "which backward is running: a rebuilt tensor lives for one"),
    PrivateAPI("torch.autograd.graph._engine_run_backward", _T, "which call is the engine's own, in an estimate"),
    PrivateAPI("torch.autograd.Variable._execution_engine", _T, "a callback when a backward ends; a backward of fake "
               "tensors without Tensor.backward"),
    PrivateAPI("torch._C._functions.DelayedError", _T, "the error of a second derivative"),
    PrivateAPI("torch._C._are_functorch_transforms_active", _T, "stock code runs under torch.func"),
    PrivateAPI("torch.autograd.forward_ad._current_level", _T, "stock code runs under forward-mode differentiation"),
    PrivateAPI("torch._C._AutoDispatchBelowAutograd", _T, "the code of a program without autograd's share of each op"),
    PrivateAPI("torch._C._len_torch_dispatch_stack", _T, "whether somebody watches the ops of that code"),
    PrivateAPI("torch._C._ForceDispatchKeyGuard", _T, "autograd again for code of others inside of it"),
    PrivateAPI("torch._C._dispatch_tls_local_include_set", _T, "the same"),
    PrivateAPI("torch._C._dispatch_tls_local_exclude_set", _T, "the same"),
    # tensors
    PrivateAPI("torch.zeros(1)._version", _T, "whether somebody wrote in place"),
    PrivateAPI("torch.zeros(1)._base", _T, "whether a tensor is a view of a parameter"),
    PrivateAPI("torch.zeros(1)._is_view", _T, "outputs of Functions must not be views"),
    PrivateAPI("torch.ops.aten._unsafe_view", _T, "the same memory as a tensor that is no view"),
    PrivateAPI("torch.zeros(1).untyped_storage()._cdata", _T, "the identity of a storage, also of fake tensors"),
    PrivateAPI("torch.nn.functional._max_pool2d", _T, "whose indices are saved"),
    PrivateAPI("torch.zeros(1).to_sparse()._indices", _T, "the memory of a sparse tensor, also if not coalesced"),
    PrivateAPI("torch.zeros(1).to_sparse()._values", _T, "the memory of a sparse tensor, also if not coalesced"),
    PrivateAPI("torch.ops.aten.add.Tensor._schema", _T, "whether an op writes on its arguments"),
    PrivateAPI("torch.Tensor._make_wrapper_subclass", _T, "logits that are not computed yet"),
    PrivateAPI("torch._C.DisableTorchFunctionSubclass", _T, "ops on such logits as ops on any tensor"),
    PrivateAPI("torch._subclasses.fake_tensor.FakeTensor", _T, "estimates: tensors without memory count as plain ones"),
    PrivateAPI("torch._subclasses.fake_tensor.FakeTensorMode", _T, "estimates: a step without memory"),
    PrivateAPI("torch._subclasses.fake_tensor.unset_fake_temporarily", _T, "estimates: masks with real values"),
    PrivateAPI("torch.utils._python_dispatch._disable_current_modes", _T, "layers are tried where nobody counts ops"),
    PrivateAPI("torch.testing._internal.distributed.fake_pg.FakeStore", _T, "estimates: one process of several"),
    PrivateAPI("torch.Tensor._make_subclass", _T, "estimates: fake tensors, made as their constructor does"),
    PrivateAPI("torch._C._set_throw_on_mutable_data_ptr", _T, "the same: the data of such a tensor are not read"),
    PrivateAPI("torch._C._get_dispatch_mode", _T, "estimates: whether what is made becomes a fake tensor"),
    PrivateAPI("torch._C._TorchDispatchModeKey.FAKE", _T, "the same"),
    PrivateAPI("torch._C.DisableTorchFunction", _T, "estimates: shapes asked for without the modes of a step"),
    PrivateAPI("torch._C._DisableTorchDispatch", _T, "estimates: tensors made without the modes of a step"),
    PrivateAPI("torch.utils._python_dispatch.TorchDispatchMode", _T, "estimates: every op of a step is seen"),
    PrivateAPI("torch.utils._pytree.tree_map_only", _T, "tensors in nested arguments"),
    PrivateAPI("torch.utils._device._device_constructors", _T, "estimates: functions that make tensors"),
    PrivateAPI("torch._C._profiler._EventType", _T, "the allocator's events in a profile"),
    # kernels that stock composes, called by name
    PrivateAPI("torch.ops.aten._is_all_true", _T, "estimates: checks of values that are not there"),
    PrivateAPI("torch._fused_sdp_choice", _T, "which attention kernel torch would take"),
    PrivateAPI("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu", _T, "its forward with the statistics"),
    PrivateAPI("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", _T, "its backward"),
    *(PrivateAPI(f"torch.ops.aten._{kernel}_attention_{way}", _T, "attention inside of packed sequences on CUDA")
      for kernel in ("flash", "efficient") for way in ("forward", "backward")),
    PrivateAPI("torch.ops.aten._scaled_dot_product_flash_attention", _T, "CUDA's kernel, by itself"),
    PrivateAPI("torch.ops.aten._scaled_dot_product_flash_attention_backward", _T, "its backward"),
    PrivateAPI("torch.ops.aten._scaled_dot_product_cudnn_attention", _T, "cudnn's, whose operations are counted"),
    PrivateAPI("torch.ops.aten._scaled_dot_product_cudnn_attention_backward", _T, "its backward"),
    PrivateAPI("torch.ops.aten._scaled_dot_product_efficient_attention", _T, "another one of CUDA"),
    PrivateAPI("torch.ops.aten._scaled_dot_product_efficient_attention_backward", _T, "its backward"),
    PrivateAPI("torch.ops.aten._fused_sdp_choice", _T, "estimates: the question above, seen as an op"),
    PrivateAPI("torch.ops.aten._softmax_backward_data", _T, "the backward of softmax from its output"),
    PrivateAPI("torch.ops.aten._log_softmax_backward_data", _T, "the backward of log_softmax from its output"),
    PrivateAPI("torch.ops.aten._scaled_dot_product_attention_math", _T, "estimates: what the composed attention makes"),
    PrivateAPI("torch.ops.aten._grouped_mm", _T, "the products of experts"),
    PrivateAPI("torch.ops.aten._to_copy", _T, "casts of logits that are not computed yet"),
    PrivateAPI("torch.ops.aten._local_scalar_dense", _T, "estimates: a number read from a tensor without memory"),
    # modules
    PrivateAPI("torch.nn.Linear(1, 1)._parameters", _T, "parameters by name, without a parametrisation's property"),
    PrivateAPI("torch.nn.Linear(1, 1)._buffers", _T, "a probe's copy has buffers of its own"),
    PrivateAPI("torch.nn.Linear(1, 1)._modules", _T, "children by name: probes on stand-ins, what came since patching"),
    PrivateAPI("torch.nn.Linear(1, 1)._forward_hooks", _T, "whether somebody wants to see a module called"),
    *(PrivateAPI(f"torch.nn.modules.module._global_{kind}", _T, "whether somebody wants to see every module called")
      for kind in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")),
    PrivateAPI("torch.nn.Linear(1, 1)._compiled_call_impl", _T, "memory_report: what a call of a module runs"),
    PrivateAPI("torch.nn.Linear(1, 1)._call_impl", _T, "memory_report: whether a frame on the stack is a module's"),
    PrivateAPI("torch.nn.Linear(1, 1)._get_name", _T, "the name in repr(model)"),
    PrivateAPI("torch.nn.Conv2d(1, 1, 1)._conv_forward", _T, "the stock convolution on a weight that was read once"),
    PrivateAPI("torch.nn.Conv2d(1, 1, 1)._reversed_padding_repeated_twice", _T, "padding in pixels, also of 'same'"),
    PrivateAPI("torch.nn.modules.conv._ConvNd", _T, "convolutions that no rule knows, for the report"),
    PrivateAPI("torch.nn.modules.batchnorm._NormBase", _T, "batch norms that no rule knows, for the report"),
    PrivateAPI("torch.nn.DataParallel.replicate", _T, "calls _replicate_for_data_parallel, which we refuse by name"),
    # torch.compile
    PrivateAPI("torch._functorch.partitioners.min_cut_rematerialization_partition", _T, "divides a joint graph"),
    PrivateAPI("torch.fx._lazy_graph_module._use_lazy_graph_module", _T, "no code of graphs that only we read"),
    PrivateAPI("torch._functorch.partitioners.get_default_op_list", _T, "which ops it takes for cheap, dear or random"),
    PrivateAPI("torch._inductor.config.custom_partitioner_fn", _T, "our partition of patched models' graphs"),
    PrivateAPI("torch._inductor.custom_graph_pass.CustomPartitionerFn", _T, "what that must be"),
    PrivateAPI("torch._inductor.fx_passes.replace_random.replace_random_passes", _T, "random numbers as seeds"),
    PrivateAPI("torch._inductor.compile_fx.compile_fx_inner", _T, "code of a layer's graphs, without Dynamo"),
    PrivateAPI("torch._inductor.compile_fx.record_original_output_strides", _T, "as the graphs lay it out in memory"),
    PrivateAPI("torch._inductor.inductor_prims.random", _T, "random numbers of seeds, in these graphs"),
    PrivateAPI("torch._inductor.inductor_prims.seeds", _T, "a CPU's seeds one by one"),
    PrivateAPI("torch._inductor.inductor_prims.lookup_seed", _T, "the same"),
    PrivateAPI("torch._inductor.inductor_prims.force_stride_order", _T, "writes a tensor that a called graph reads"),
    PrivateAPI("torch._functorch._activation_offloading", _T, "its `offload_ops`, where it has them (torch 2.13)"),
    PrivateAPI("torch.ops.higher_order.invoke_subgraph", _T, "equal codecs are compiled once"),
    PrivateAPI("torch._inductor.config.cpp_wrapper", _T, "where they are not"),
    PrivateAPI("torch._inductor.decomposition.select_decomp_table", _T, "the ops of codecs as the compiler takes them"),
    PrivateAPI("torch._dynamo.backends.common.aot_autograd", _T, 'the backend "hf_actcompress"'),
    PrivateAPI("torch._dynamo.backends.registry._COMPILER_FNS", _T, "whether that backend is known already"),
    PrivateAPI("torch._functorch._aot_autograd.utils.make_boxed_func(len)._boxed_call", _T, "says that one list "
               "is taken"),
    PrivateAPI("torch.fx.graph._BoxedCodeGen", _T, "a graph that frees what it was given"),
    PrivateAPI("torch._inductor.compile_fx.compile_fx", _T, "a compiled step that is watched: what it does to a graph"),
    PrivateAPI("torch._functorch.config.enable_autograd_cache", _T, "off where code from a cache is not wanted"),
    PrivateAPI("torch._dynamo.config.assume_static_by_default", _T, "whether a graph is for any length"),
    PrivateAPI("torch._dynamo.utils.counters", _T, "whether a graph was broken, for a warning"),
    PrivateAPI("torch._dynamo.callback_handler.end_callbacks", _T, "the end of a frame that may be broken or skipped"),
    PrivateAPI("torch._guards.CompileContext.current_compile_id", _T, "which frame of a broken graph is compiled"),
    PrivateAPI("torch._C._functorch.is_legacy_batchedtensor", _T, "backwards of several samples at once"),
    PrivateAPI("torch._C._functorch.is_batchedtensor", _T, "backwards of several samples at once"),
    PrivateAPI("torch._C._functorch.maybe_get_level", _T, "backwards of several samples at once"),
    PrivateAPI("torch._C._functorch._remove_batch_dim", _T, "backwards of several samples at once"),
    PrivateAPI("torch._C._functorch._add_batch_dim", _T, "backwards of several samples at once"),
    PrivateAPI(
        "torch._functorch.pyfunctorch.temporarily_pop_interpreter_stack", _T, "backwards of several samples at once"
    ),
    PrivateAPI("torch._remove_batch_dim", _T, "backwards of several samples at once"),
    PrivateAPI("torch._add_batch_dim", _T, "backwards of several samples at once"),
    PrivateAPI("torch._C._vmapmode_increment_nesting", _T, "backwards of several samples at once"),
    PrivateAPI("torch._C._vmapmode_decrement_nesting", _T, "backwards of several samples at once"),
    PrivateAPI("torch._C._get_tracing_state", _T, "stock's code in a torch.jit.trace"),
    PrivateAPI("torch.compiler._is_exporting_flag", _T, "no marks in a program for those who do not have this package"),
    PrivateAPI("torch.distributed.fsdp.FSDPModule._get_fsdp_state", _T, "whether a head's weights stay in memory until "
               "its loss is computed"),
    PrivateAPI("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState()._fsdp_param_group", _T, "the same"),
    PrivateAPI("torch._dispatch.python.enable_python_dispatcher", _T, "codecs traced for sizes that may be any"),
    # graphs of layers
    *(PrivateAPI(f"torch._subclasses.fake_impls.{name}", _T, "shapes of grouped products that are not bf16")
      for name in ("register_op_impl", "op_implementations_dict")),
    PrivateAPI("torch._subclasses.fake_tensor.in_kernel_invocation_manager", _T, "ops without data by rules in Python"),
    PrivateAPI("torch._subclasses.fake_tensor.FakeTensorMode.wrap_meta_outputs_with_default_device_logic", _T, "the "
               "device of what such an op makes"),
    PrivateAPI("torch._functorch.config.patch", _T, "a graph is divided as it was traced"),
    PrivateAPI("torch._guards.TracingContext", _T, "the sizes of a graph that is divided"),
    PrivateAPI("torch._ops.OpOverload", _T, "torch's own binding of an op; of its _schema, the name and types"),
    PrivateAPI("torch._C._nn", _T, "where some bindings are"),
    # transformers
    PrivateAPI("transformers.LlamaConfig()._attn_implementation", _H, "which attention a module runs"),
    PrivateAPI("transformers.utils.output_capturing._active_collector", _H, "which outputs hooks capture now; "
               "of a hook, the name `key` in its closure says which"),
    PrivateAPI("transformers.PreTrainedModel.loss_function", _H, "whether a model has a loss of its own, which it has "
               "in _loss_function; a model without one is given the default loss while it is traced"),
    PrivateAPI("transformers.PreTrainedModel._supports_sdpa", _H, "whether to advise it"),
    PrivateAPI("transformers.modeling_layers.GradientCheckpointingLayer", _H, "has _gradient_checkpointing_func, which "
               "runs a checkpointed layer"),
    # diffusers
    PrivateAPI("diffusers.WanTransformer3DModel._keep_in_fp32_modules", "diffusers 0.35", "estimates: which weights "
               "from_pretrained leaves in fp32"),
)  # fmt: skip
