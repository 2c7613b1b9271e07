{{- /* How containers see GPUs. The engine owns them; the sidecar sees the same ones and owns none. */ -}}

{{- define "kvferry.gpuCount" -}}
{{- default (include "kvferry.ranks" . | int64) .Values.gpu.count | int64 -}}
{{- end }}

{{- /* The runtime class is a pod's: it holds for the engine's container too. */ -}}
{{- define "kvferry.gpuRuntime" -}}
{{- if and (eq .Values.gpu.access "env") .Values.gpu.runtimeClassName }}
runtimeClassName: {{ .Values.gpu.runtimeClassName }}
{{- end }}
{{- end }}

{{- /* The claim of the pod that holds the sidecar. */ -}}
{{- define "kvferry.gpuClaims" -}}
{{- if has .Values.gpu.access (list "dra" "draAdmin") }}
resourceClaims:
  - name: gpu
    resourceClaimTemplateName: {{ include "kvferry.fullname" . }}-gpu
{{- end }}
{{- end }}

{{- define "kvferry.gpuPodAnnotations" -}}
{{- if eq .Values.gpu.access "cdiAnnotation" }}
nvidia.cdi.k8s.io/container.kvferry: {{ .Values.gpu.cdiDevice }}
{{- end }}
{{- end }}

{{- define "kvferry.gpuEnv" -}}
{{- if eq .Values.gpu.access "env" }}
- name: NVIDIA_VISIBLE_DEVICES
  value: all
- name: NVIDIA_DRIVER_CAPABILITIES
  value: compute,utility
{{- end }}
{{- end }}

{{- /* The engine's own GPUs, as limits. Under dra they come with the claim. */ -}}
{{- define "kvferry.engineResources" -}}
{{- $resources := deepCopy .Values.engine.resources -}}
{{- if eq .Values.gpu.access "dra" -}}
{{- $_ := set $resources "claims" (list (dict "name" "gpu")) -}}
{{- else if ne .Values.gpu.access "none" -}}
{{- $limits := mustMergeOverwrite (dict .Values.gpu.resourceName (include "kvferry.gpuCount" . | int64)) ($resources.limits | default dict) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}
