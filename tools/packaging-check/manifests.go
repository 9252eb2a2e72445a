package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/yaml"
)

// The objects of the manifests, by kind.
type objects struct {
	configMaps  map[string]*corev1.ConfigMap
	deployments []*appsv1.Deployment
	services    []*corev1.Service
	budgets     []*policyv1.PodDisruptionBudget
}

// Refuses unknown and repeated fields, and values of another type.
func decode(files []string) (*objects, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{appsv1.AddToScheme, corev1.AddToScheme, policyv1.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
	found := &objects{configMaps: map[string]*corev1.ConfigMap{}}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		for _, document := range bytes.Split(text, []byte("\n---\n")) {
			// The decoder alone would ignore what follows the first document.
			if json, err := yaml.ToJSON(document); err != nil || string(json) == "null" {
				return nil, fmt.Errorf("%s: a document is empty or no YAML: %v", file, err)
			}
			object, _, err := decoder.Decode(document, nil, nil)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", file, err)
			}
			switch object := object.(type) {
			case *corev1.ConfigMap:
				found.configMaps[object.Name] = object
			case *appsv1.Deployment:
				found.deployments = append(found.deployments, object)
			case *corev1.Service:
				found.services = append(found.services, object)
			case *policyv1.PodDisruptionBudget:
				found.budgets = append(found.budgets, object)
			default:
				return nil, fmt.Errorf("%s: nothing checks objects of type %T", file, object)
			}
		}
	}
	return found, nil
}

// Checks what the types do not say: each reference has its target.
func checkReferences(objects *objects) error {
	var failures []error
	fail := func(name, format string, args ...any) {
		failures = append(failures, fmt.Errorf(name+": "+format, args...))
	}
	for _, deployment := range objects.deployments {
		name, pod := deployment.Name, deployment.Spec.Template.Spec
		if !selects(deployment.Spec.Selector, deployment) {
			fail(name, "its selector does not select its pods")
		}
		for _, spread := range pod.TopologySpreadConstraints {
			if !selects(spread.LabelSelector, deployment) {
				fail(name, "a topology spread constraint does not select its pods")
			}
		}
		volumes := map[string]bool{}
		for _, volume := range pod.Volumes {
			volumes[volume.Name] = true
			if volume.ConfigMap != nil && objects.configMaps[volume.ConfigMap.Name] == nil {
				fail(name, "there is no ConfigMap %s", volume.ConfigMap.Name)
			}
		}
		for _, container := range allContainers(&pod) {
			for _, mount := range container.VolumeMounts {
				if !volumes[mount.Name] {
					fail(name, "there is no volume %s", mount.Name)
				}
			}
			if probe := container.ReadinessProbe; probe != nil {
				if _, err := port(&container, probe.HTTPGet.Port); err != nil {
					fail(name, "readiness probe: %v", err)
				}
			}
			if context := container.SecurityContext; context == nil || context.ReadOnlyRootFilesystem == nil ||
				context.AllowPrivilegeEscalation == nil || *context.AllowPrivilegeEscalation || context.Capabilities == nil {
				fail(name, "container %s has more rights than it needs", container.Name)
			}
		}
		if context := pod.SecurityContext; context == nil || context.RunAsNonRoot == nil || !*context.RunAsNonRoot ||
			context.RunAsUser == nil || *context.RunAsUser == 0 || context.RunAsGroup == nil {
			fail(name, "it may run as root")
		}
		if *deployment.Spec.Replicas > 1 && !slices.ContainsFunc(objects.budgets, func(budget *policyv1.PodDisruptionBudget) bool {
			return selects(budget.Spec.Selector, deployment)
		}) {
			fail(name, "it has no disruption budget")
		}
	}
	for _, budget := range objects.budgets {
		selector := budget.Spec.Selector
		if !slices.ContainsFunc(objects.deployments, func(d *appsv1.Deployment) bool { return selects(selector, d) }) {
			fail(budget.Name, "the disruption budget selects no pods")
		}
	}
	for _, service := range objects.services {
		selector := &metav1.LabelSelector{MatchLabels: service.Spec.Selector}
		for _, servicePort := range service.Spec.Ports {
			if !slices.ContainsFunc(objects.deployments, func(d *appsv1.Deployment) bool {
				return selects(selector, d) && slices.ContainsFunc(d.Spec.Template.Spec.Containers, func(c corev1.Container) bool {
					_, err := port(&c, servicePort.TargetPort)
					return err == nil
				})
			}) {
				fail(service.Name, "no pod of the service has the port %s", servicePort.TargetPort.String())
			}
		}
	}
	if len(objects.deployments) == 0 {
		fail("manifests", "they contain no Deployment")
	}
	return errors.Join(failures...)
}

func selects(selector *metav1.LabelSelector, deployment *appsv1.Deployment) bool {
	parsed, err := metav1.LabelSelectorAsSelector(selector)
	return err == nil && !parsed.Empty() && parsed.Matches(labels.Set(deployment.Spec.Template.Labels))
}

func allContainers(pod *corev1.PodSpec) []corev1.Container {
	return slices.Concat(pod.InitContainers, pod.Containers)
}

// Returns the number of a port of a container, which may be given by its name.
func port(container *corev1.Container, wanted intstr.IntOrString) (int32, error) {
	for _, port := range container.Ports {
		if port.Name == wanted.StrVal && wanted.Type == intstr.String || port.ContainerPort == wanted.IntVal {
			return port.ContainerPort, nil
		}
	}
	return 0, fmt.Errorf("container %s has no port %s", container.Name, wanted.String())
}
