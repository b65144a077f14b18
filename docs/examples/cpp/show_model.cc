// Opens a model and works with its tensors as at::Tensor: nothing is read from disk, nothing is
// copied when another process has opened the model before.
#include <ATen/ATen.h>

#include <exception>
#include <iostream>
#include <modelcache/torch.hpp>

int main(int argc, char** argv) try {
  if (argc != 2) {
    std::cerr << "usage: show_model PATH\n";
    return 2;
  }
  auto client = modelcache::Client::Connect().ValueOrThrow();
  auto model = client.Open(argv[1]).ValueOrThrow();
  const mc_info info = model.Info();
  std::cout << info.name << ": " << (info.hit != 0 ? "hit" : "miss") << ", " << info.reason << '\n';

  for (const auto& [name, tensor] : modelcache::LoadStateDict(model).ValueOrThrow()) {
    std::cout << name << ' ' << tensor.toString() << ' ' << tensor.sizes();
    if (tensor.is_floating_point() && tensor.element_size() > 1 && !tensor.is_meta()) {
      std::cout << " sum " << tensor.to(at::kDouble).sum().item<double>();
    }
    std::cout << '\n';
  }
  return 0;
} catch (const std::exception& e) {
  std::cerr << "show_model: " << e.what() << '\n';
  return 1;
}
